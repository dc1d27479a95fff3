"""Tasks that read local files of data sets. Nothing is downloaded."""
