"""The limit of open files of a process."""

import sys

if sys.platform != "win32":
    import resource

MOST_FILES = 1 << 16
"""Open files that a process asks for, if the system allows more."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: every connection needs a file.

    Many systems start a process with 1,024, fewer than the streams of a busy server or benchmark.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
