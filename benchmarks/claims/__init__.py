"""Claims of the documents: figures in sentences compared with stored and repeated measurements."""
