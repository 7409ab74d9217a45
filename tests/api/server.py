"""A real server in a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass
class Server:
    """A server at work. said: with -json, when it began to listen."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    said: dict[str, Any] = field(default_factory=dict)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def running(folder: Path, *args: str | Path) -> Iterator[Server]:
    """`jitllmd serve ARGS`, stopped at the end of the block."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "jitllm.cli.daemon.main", "serve", "-addr", "127.0.0.1:0"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "-json", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # Ray's own processes would inherit it, and their packages warn.
            process_group=0,  # as a shell does it
            env={**os.environ} if "-ray" in args else {**os.environ, "PYTHONWARNINGS": "error"},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        said = json.loads(line)
        yield Server(said["url"], process, log, said)
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]


def chat_model(source: Path, path: Path) -> Path:
    """Converts a GGUF file with a chat template."""
    from jitllm.formats.convert import convert
    from jitllm.text.vocabulary import VocabularyData

    convert(source, path, read_vocabulary=VocabularyData.from_gguf, chat_template=TEMPLATE)
    return path
