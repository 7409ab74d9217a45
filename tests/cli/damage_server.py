"""Tries damaged model files, each in a child of its own: `python damage_server.py < JOB`.

The job is a JSON object: `models`, paths of sound files by pairs of GGUF and container; `kind`,
what is damaged ("gguf" or "jlm"); `seeds`, which ones; `folder`, where to work. A line of JSON on
stdout tells how each one went: `seed`, `fault` (None if all is well), `outcome`, `message`,
`resident_kib` (the peak). All that is needed is imported before the first child is forked and no
thread is started here, so a child costs what the model costs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from llvmlite import binding  # noqa: E402

from jitllm.cli.main import main as jitllm  # noqa: E402
from jitllm.jit.cache import emitters_fingerprint  # noqa: E402
from tests.cli import damage  # noqa: E402

ADDRESS_SPACE = 1 << 30
SECONDS = 5
MAX_RESIDENT_KIB = 400 << 10
MAX_MESSAGE = 1000

BUGS = ("Traceback", "a bug:", "out of memory", "Fatal Python error", "LLVM ERROR")


def preload() -> None:
    """Import what a conversion and a run import."""
    for name in ("cli.run", "cli.convert", "compose", "formats.convert", "text.tokenizer"):
        importlib.import_module(f"jitllm.{name}")
    for path in sorted((ROOT / "jitllm" / "kernels").glob("*/cpu.py")):
        importlib.import_module(f"jitllm.kernels.{path.parent.name}.cpu")
    for name in ("jinja2", "jinja2.sandbox", "jinja2.ext", "tokenizers", "jitllm.text.chat"):
        importlib.import_module(name)
    emitters_fingerprint()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    with contextlib.redirect_stderr(io.StringIO()):  # the command line imports on demand, too
        jitllm(["run", "/none", "-n", "1", "-json", "x"])
        jitllm(["convert", "/none"])
    gc.freeze()  # a collection in a child would copy every page


class Trial:
    """One damaged file in one folder."""

    def __init__(self, job: dict[str, Any], seed: int) -> None:
        pairs = job["models"]
        self.seed = seed
        self.kind = job["kind"]
        self.source, self.container = (Path(path) for path in pairs[seed % len(pairs)])
        self.answer: list[int] = job["answers"][seed % len(pairs)]
        self.folder = Path(job["folder"])

    def run(self) -> dict[str, Any]:
        """Damage, use and judge; in a child of its own."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        outputs = [os.memfd_create(name) for name in ("out", "err", "report")]
        child = os.fork()
        if not child:
            self._child(*outputs)
        fault = watch(child)
        out, err, report = (_contents(fd) for fd in outputs)
        for fd in outputs:
            os.close(fd)
        told = json.loads(report) if report else {}
        found = {"seed": self.seed, "outcome": "", "message": "", "resident_kib": 0} | told
        found["fault"] = fault or told.get("fault", "the trial failed")
        if found["fault"]:
            found["message"] = f"out: {out[-2000:]} err: {err[-4000:]}"
        return found

    def _child(self, out: int, err: int, report: int) -> None:
        code = 1
        try:
            os.dup2(out, 1)
            os.dup2(err, 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            told = self._use(out, err)
            told["resident_kib"] = _peak_kib()
            if told["resident_kib"] > MAX_RESIDENT_KIB:
                told["fault"] = f"it took {told['resident_kib']} KiB"
            os.pwrite(report, json.dumps(told).encode(), 0)
            code = 0
        except BaseException:  # not even SystemExit may come back into the server
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _use(self, out: int, err: int) -> dict[str, Any]:
        path = self.folder / f"m.{self.kind}"
        if self.kind == "gguf":
            sound = self.source.read_bytes()
            path.write_bytes(damage.damaged_gguf(self.seed, sound))
            told = self._call(out, err, "convert", path)
            left = sorted(p.name for p in self.folder.iterdir())
            if told["fault"] or told["code"]:
                return told | ({} if left == ["m.gguf"] else {"fault": f"it left {left}"})
            path = path.with_suffix(".jlm")
        else:
            path.write_bytes(damage.damaged_jlm(self.seed, self.container.read_bytes()))
        return self._answer(out, err, path)

    def _answer(self, out: int, err: int, path: Path) -> dict[str, Any]:
        """Paged and all in memory: the same answer, or the same refusal."""
        chat = ("-chat",) if self.seed % 5 == 0 else ()
        draw = ("-temp", "1", "-top-k", "40", "-top-p", "0.9", "-repeat-penalty", "1.1")
        draw = draw if self.seed % 7 == 0 else ()
        paged, whole = (
            self._call(
                out, err, "run", path, *flags, *chat, *draw, "-n", "1", "-json", "Hello there"
            )
            for flags in (("-maxmem", "1"), ("-threads", "1"))
        )
        if paged["fault"] or whole["fault"]:
            return paged if paged["fault"] else whole
        if paged["code"] != whole["code"] or paged["ids"] != whole["ids"]:
            return paged | {"fault": f"paging changes the answer: {paged} {whole}"}
        is_believed = self.kind == "gguf" or damage.is_forged(self.seed)
        if (
            not is_believed
            and not paged["code"]
            and paged["ids"] != self.answer
            and not (chat or draw)
        ):
            return paged | {"fault": f"a wrong answer: {paged['ids']}"}
        return paged

    def _call(self, out: int, err: int, *args: object) -> dict[str, Any]:
        """Run a command line; what it came to, and `fault` if that is not as it must be."""
        for fd in (out, err):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        code = jitllm([str(arg) for arg in args])
        sys.stdout.flush()
        sys.stderr.flush()
        return {"outcome": f"{args[0]} {code}"} | judge(code, _contents(out), _contents(err))


def judge(code: int, out: str, err: str) -> dict[str, Any]:
    """What a command line that ended with `code` said, and what is wrong with that."""
    lines = [line for line in err.splitlines() if line.startswith("jitllm: ")]
    message = "".join(lines[:1])
    told: dict[str, Any] = {"code": code, "message": message, "ids": None, "fault": None}
    if bug := next((bug for bug in BUGS if bug in err), None):
        told["fault"] = f"{bug!r} on stderr"
    elif code == 0:
        told["ids"] = json.loads(out)["ids"] if out else []
        told["fault"] = "an error and exit code 0" if lines else None
    elif code not in (1, 2):
        told["fault"] = f"exit code {code}"
    elif len(lines) != 1 or not err.endswith(f"{message}\n") or out:
        told["fault"] = "not one line that says what is wrong"
    elif not message.isprintable() or len(message) > MAX_MESSAGE:
        told["fault"] = f"not a clear line: {len(message)} characters"
    return told


def watch(child: int) -> str | None:
    """How a child ended, if not well; one that takes too long is killed."""
    pidfd = os.pidfd_open(child)
    ready = select.select([pidfd], [], [], SECONDS)[0]
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.close(pidfd)
    _, status = os.waitpid(child, 0)
    if not ready:
        return f"it hung for {SECONDS} s"
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return None


def _contents(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode(errors="replace")


def _peak_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def main() -> None:
    """Serve one job."""
    job = json.load(sys.stdin)
    preload()
    for seed in range(*job["seeds"]):
        print(json.dumps(Trial(job, seed).run()), flush=True)


if __name__ == "__main__":
    main()
