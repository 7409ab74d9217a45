"""A chat template at work, alone in a process that cannot take more than it was given.

Run as a script: reads JSON from standard input, a line each: first {source, seconds, chars}, then
the variables of one rendering after the other. Answers each with a line: {text}, or {refused} when
the template refuses what it is given, {wrong} when it is no template, {failed} when it fails.
A process that takes too much time ends by SIGPROF. Imports nothing of this package.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Answer = dict[str, str]


class RefusedError(Exception):
    """`raise_exception` in a template."""


class Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: object) -> NoReturn:
    """What templates call to say that a conversation makes no sense to them."""
    raise RefusedError(str(message))


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates expect it: not escaped for HTML, which is what jinja2's own does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def compiled(source: str) -> Template:
    """The template. Raises what jinja2 raises; it computes constants already."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def render(template: Template, values: dict[str, Any], max_chars: int) -> Answer:
    """The text. values: `now`, an ISO time, becomes `strftime_now`."""
    now = datetime.fromisoformat(values.pop("now"))
    text = template.render(values, strftime_now=now.strftime)
    if len(text) > max_chars:
        return {"failed": f"its text has more than {max_chars} characters"}
    return {"text": text}


def tried(work: Callable[[], Answer]) -> Answer:
    """What `work` answers, or why it does not."""
    try:
        return work()
    except RefusedError as error:
        return {"refused": str(error)}
    except TemplateSyntaxError as error:
        return {"wrong": f"in line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"failed": "it takes too much memory"}
    except Exception as error:  # whatever a stranger's template may do
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer until standard input ends."""
    first = json.loads(sys.stdin.readline())
    seconds, max_chars = first["seconds"], first["chars"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A text as pieces, as a whole and as JSON; besides Python and jinja2.
    most = 8 * max_chars + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    found: list[Template] = []

    def compile_it() -> Answer:
        found.append(compiled(first["source"]))
        return {"text": ""}

    work: Callable[[], Answer] = compile_it
    while True:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time: a busy machine is no fault
        answer = json.dumps(tried(work))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line or not found:
            return
        work = partial(render, found[0], json.loads(line), max_chars)


if __name__ == "__main__":
    main()
