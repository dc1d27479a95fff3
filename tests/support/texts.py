from quire.evals.questions import DOCUMENT_START
from quire.evals.tasks import make


def lines_prompts(count, words=120):
    """Prompts that ask for one of several lines, as the lines of a file of prompts."""
    tasks = [make("lines", seed, words) for seed in range(count)]
    return [
        {"prompt": DOCUMENT_START + task.prompt(), "answer": task.queries[0].answer}
        for task in tasks
    ]
