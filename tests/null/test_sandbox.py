"""What a stranger's template may do, and what becomes of one that does more."""

from __future__ import annotations

import os
import threading

import psutil
import pytest

from jitllm.errors import JitllmError, UsageError
from jitllm.text.sandbox import MAX_CHARS, Sandbox

NOW = "2024-02-29T12:00:00"
MANY = "{% for a in range(99999) %}{% for b in range(99999) %}"
TWICE = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = NEXT %}{% endfor %}"


def doubling(start: str, following: str, end: str = "{{ ns.x | length }}") -> str:
    return TWICE.replace("START", start).replace("NEXT", following) + end


HOSTILE = {
    "loops": f"{MANY}{{% endfor %}}{{% endfor %}}",
    "loops that write": f"{MANY}x{{% endfor %}}{{% endfor %}}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "joins": doubling("'x'", "ns.x ~ ns.x"),
    "sums": doubling("'x'", "ns.x + ns.x"),
    "lists": doubling("[1]", "ns.x + ns.x"),
    "lists of lists": doubling("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "JSON of lists": doubling("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "formats": "{{ '%9999999999d' % 1 }}",
    "wide formats": "{{ '{:{}}'.format(1, 10 ** 10) }}",
    "padding": "{{ messages[0].ljust(10 ** 10) }}",
    "filters": "{{ 'x' | center(10 ** 10) }}",
    "replacing": doubling("'xx'", "ns.x.replace('x', ns.x)"),
    "products": "{{ 'x' * 10 ** 10 }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "sources": "{{ [" + "[" * 5000 + "]" * 5000 + "] }}",
    "blocks": "{% set x %}x{% endset %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40
    + "{{ x | length }}",
}


@pytest.fixture(scope="module")
def fine() -> Sandbox:
    return Sandbox("{{ messages[0] }}")


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_grows_or_runs_on_is_ended(source: str, fine: Sandbox) -> None:
    with pytest.raises(JitllmError) as caught:
        Sandbox(source, max_seconds=0.3).render({"messages": ["hi"], "now": NOW})
    assert not isinstance(caught.value, UsageError)
    assert "chat-template FILE" in caught.value.remedy
    assert fine.render({"messages": ["hi"], "now": NOW}) == "hi"


def test_the_next_rendering_after_one_that_was_ended_is_done() -> None:
    loops = "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}ok"
    sandbox = Sandbox(loops, max_seconds=0.3)
    for _ in range(2):
        assert sandbox.render({"n": 3, "now": NOW}) == "ok"
        with pytest.raises(JitllmError, match="takes more than 0.3 s"):
            sandbox.render({"n": 99_999, "now": NOW})
    assert sandbox.render({"n": 3, "now": NOW}) == "ok"


def test_a_text_may_be_large_and_not_larger() -> None:
    sandbox = Sandbox("{{ 'x' * n }}")
    assert len(sandbox.render({"n": MAX_CHARS, "now": NOW})) == MAX_CHARS
    with pytest.raises(JitllmError, match=f"more than {MAX_CHARS} characters"):
        sandbox.render({"n": MAX_CHARS + 1, "now": NOW})


def test_everything_that_json_can_say_arrives(fine: Sandbox) -> None:
    for text in ("\n\r\u2028", "\ud800", "\U0001f600", "x" * (16 << 20)):
        assert fine.render({"messages": [text], "now": NOW}) == text
    with pytest.raises(UsageError, match="what JSON can say"):
        fine.render({"messages": [object()], "now": NOW})


def test_many_threads_may_render(fine: Sandbox) -> None:
    texts: list[str] = []

    def work(number: int) -> None:
        texts.append(fine.render({"messages": [str(number)], "now": NOW}))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts, key=int) == [str(number) for number in range(16)]


def test_a_process_that_was_killed_is_replaced_and_one_that_nobody_needs_ends() -> None:
    before = set(psutil.Process().children())
    sandbox = Sandbox("{{ messages[0] }}")
    for _ in range(2):
        [child] = set(psutil.Process().children()) - before
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert sandbox.render({"messages": ["hi"], "now": NOW}) == "hi"
    del sandbox
    assert set(psutil.Process().children()) == before
