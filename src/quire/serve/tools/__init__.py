"""Tool calls of chats: definitions, forced grammars, and parsers of the models' formats."""
