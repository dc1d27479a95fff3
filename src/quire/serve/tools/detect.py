"""The parser for a model's tool calls: named by an option, or detected from the chat template."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from quire.serve.config import ToolParserName
from quire.serve.tools.definitions import ToolChoice
from quire.serve.tools.forced import NamedParser, RequiredParser
from quire.serve.tools.parser import ToolParser
from quire.serve.tools.parsers import HermesParser, Llama3Parser, MistralParser

PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}
_OTHER_FORMATS = ("<function=", "<arg_key>")
"""Texts in templates that use a marker of PARSERS for another format."""


class ToolParsers:
    """The parser of a model.

    Args:
        name: name of a parser, or auto.
        tokenizer: the model's tokenizer; None: no parser is detected.

    Attributes:
        name: name of the parser; None if none was detected.
    """

    def __init__(self, name: ToolParserName, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.name = _detected(tokenizer) if name == "auto" else name
        kind = None if self.name is None else PARSERS[self.name]
        special = () if tokenizer is None else tokenizer.all_special_tokens
        self.marker_is_special = kind is not None and kind.marker in special

    def create(self, choice: ToolChoice) -> ToolParser | None:
        """Create the parser of one output; None if the output has no calls or no known format."""
        if choice.mode == "named":
            return NamedParser(choice.tools[0].name)
        if choice.mode == "required":
            return RequiredParser()
        if choice.mode == "none" or self.name is None:
            return None
        return PARSERS[self.name]()


def _detected(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    if tokenizer is None:
        return None
    template = tokenizer.chat_template or ""
    texts = list(template.values()) if isinstance(template, dict) else [template]
    if any(other in text for text in texts for other in _OTHER_FORMATS):
        return None
    for name, kind in PARSERS.items():
        if any(kind.marker in text for text in texts):
            return name
    known = tokenizer.get_vocab() if any("tools" in text for text in texts) else {}
    return next((name for name, kind in PARSERS.items() if kind.marker in known), None)
