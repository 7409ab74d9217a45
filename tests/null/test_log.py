import logging
import subprocess
import sys

import pytest

from jitllm import log


def test_every_logger_hangs_below_one_root() -> None:
    assert log.logger("jitllm.formats.jlm").name == "jitllm.formats.jlm"
    assert log.logger("actors.pager").name == "jitllm.actors.pager"


def test_stderr_gets_the_records_of_its_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger(log.ROOT)
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    log.to_stderr("info")
    log.to_stderr("info")
    log.logger("actors.pager").info("read 3 blocks")
    log.logger("actors.pager").debug("and a detail")
    assert capsys.readouterr().err.count("I jitllm.actors.pager: read 3 blocks\n") == 1


def test_a_library_that_was_not_asked_stays_silent() -> None:
    program = "from jitllm import log; log.logger('jitllm.x').error('oops')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
