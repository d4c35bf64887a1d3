"""What is told to a child, and what it says: bounded in time and size, whatever the child does."""

from __future__ import annotations

import os
import selectors
import subprocess
import time

_BLOCK = 64 * 1024


class TooMuch(Exception):
    """The child says more than is taken."""


def exchange(child: subprocess.Popen[bytes], document: bytes, seconds: float, largest: int) -> tuple[bytes, bytes]:
    """Writes a document to a child, and reads what it says until it has ended.

    `subprocess` would collect any amount: what a child's user runs can write into its streams.

    Args:
        child: the child, with pipes for its three streams.
        document: what it is told.
        seconds: the longest time.
        largest: bytes of each stream at most.

    Returns:
        Its standard output and its standard error.

    Raises:
        subprocess.TimeoutExpired: it has not ended.
        TooMuch: a stream has more bytes.
    """
    stdin, stdout, stderr = child.stdin, child.stdout, child.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    deadline = time.monotonic() + seconds
    said = {stdout.fileno(): bytearray(), stderr.fileno(): bytearray()}
    left = memoryview(document)
    os.set_blocking(stdin.fileno(), False)
    with selectors.DefaultSelector() as streams:
        streams.register(stdin, selectors.EVENT_WRITE, stdin)
        streams.register(stdout, selectors.EVENT_READ, stdout)
        streams.register(stderr, selectors.EVENT_READ, stderr)
        while streams.get_map():
            ready = streams.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(child.args, seconds)
            for key, _ in ready:
                if key.data is stdin:
                    left = _written(key.fd, left)
                    is_over = not left
                else:
                    is_over = not _read(key.fd, said[key.fd], largest)
                if is_over:
                    streams.unregister(key.fileobj)
                    # A child reads until the end of what it is told.
                    key.data.close()
    child.wait(max(0.0, deadline - time.monotonic()))
    answer, errors = (bytes(one) for one in said.values())
    return answer, errors


def _written(stream: int, left: memoryview) -> memoryview:
    """Returns what is left to write; nothing if the child does not read it."""
    try:
        return left[os.write(stream, left[:_BLOCK]) :]
    except BrokenPipeError:
        return left[:0]


def _read(stream: int, said: bytearray, largest: int) -> bool:
    """Adds what a stream has; returns whether there may be more."""
    data = os.read(stream, _BLOCK)
    said += data
    if len(said) > largest:
        raise TooMuch
    return bool(data)
