"""Measurements on held-out text: exact match by teacher forcing, and book loss per token."""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from quire.evals.questions import Question, make_questions
from quire.evals.tasks import BookFiller
from training.config import DOCUMENT
from training.model import Decoder, make_rope

EXACT_TASKS = ("lines", "kv", "niah")
_SKIPPED_TOKENS = 5000
"""Skipped tokens: the beginning of a book is often a table of contents."""


class Judge:
    """Measures a model on held-out text; greedy, full context, no sampling."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, held_out: tuple[str, ...]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.filler = BookFiller("\n\n\n".join(held_out))
        self.books = [self._encode(text) for text in held_out]

    def report(self, tokens: int, n: int) -> dict[str, float]:
        """Exact match of three tasks at one length, and the book loss in nats per token."""
        scores = {f"{task}@{tokens}": self.exact(task, tokens, n) for task in EXACT_TASKS}
        return scores | {"book_loss": self.book_loss(tokens)}

    def exact(self, task: str, tokens: int, n: int) -> float:
        """Fraction of prompts whose greedy continuation is the whole answer."""
        requested = make_questions(
            task, tokens, n, measure=lambda text: len(self._encode(text)), filler=self.filler
        )
        return sum(map(self._answers, requested)) / n

    def book_loss(self, tokens: int, windows: int = 3) -> float:
        """Mean loss over the first windows of every held-out book of sufficient length."""
        losses = []
        document = self.tokenizer.token_to_id(DOCUMENT)
        for book in self.books:
            start = min(_SKIPPED_TOKENS, max(0, len(book) - windows * tokens))
            for first in range(start, min(start + windows * tokens, len(book) - tokens), tokens):
                ids = torch.tensor([document, *book[first : first + tokens]])
                losses.append(F.cross_entropy(self._logits(ids)[:-1], ids[1:]).item())
        return sum(losses) / len(losses) if losses else float("nan")

    def _answers(self, question: Question) -> bool:
        prompt = self._encode(question.prompt)
        ids = torch.tensor(self._encode(question.prompt + question.answer))
        guesses = self._logits(ids).argmax(-1)
        return bool((guesses[len(prompt) - 1 : -1] == ids[len(prompt) :]).all())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @torch.no_grad()
    def _logits(self, ids: Tensor) -> Tensor:
        """Float32 logits [token, vocab] of one sequence."""
        device = self.model.norm.device
        rope = make_rope(self.model.config, len(ids), dtype=torch.float32, device=device)
        return self.model.logits(ids[None].to(device), rope)[0].cpu()
