"""A second process that computes ahead: the same values, and it never matters if it fails."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxacct import ahead, choosing

PROGRAM = """if True:
    import os, sys, time
    from jaxacct import ahead

    def who(what):
        if what == "slow": time.sleep(0.2)
        if what == "fails" and os.getpid() != first: raise ValueError("said by nobody")
        print("said to nobody") if os.getpid() != first else None
        return os.getpid(), what

    def calls():
        for what in ("slow", "quick", "fails", "after"):
            yield who, (what,)

    def value(what):
        if ahead._second and what != "other": ahead._second._connection.poll(20)  # it has begun the next one
        return ahead.value(who, what)

    first = os.getpid()
    with ahead.second_process(calls) as there:
        found = {what: value(what) for what in ("other", "slow", "quick", "fails", "after")}
        with ahead.second_process(calls) as third:
            pass
    second = found["slow"][0]
    assert there and not third and all(value[1] == what for what, value in found.items())
    assert [value[0] == first for value in found.values()] == [True, False, False, True, True]
    assert found["quick"][0] == second and ahead.value(who, "quick")[0] == first
    assert not os.path.exists(f"/proc/{second}")
    print("done")
"""


def works() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


@pytest.mark.skipif(not works(), reason="one processor, or not Linux: nothing is computed ahead")
def test_values_come_from_the_second_process_unless_it_fails():
    """One that was begun is waited for; nothing is left of the process, and it says nothing."""
    command, root = [sys.executable, "-c", PROGRAM], Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_process_with_threads_is_not_copied(monkeypatch):
    """What another thread holds would be held for ever in the copy."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it was copied"))
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    try:
        with ahead.second_process(lambda: []) as there:
            assert not there
            assert ahead.value(max, 3, 4) == 4
    finally:
        over.set()
        thread.join()


def test_what_is_computed_ahead_is_what_a_choice_asks_for(monkeypatch):
    asked = []

    def value(function, *args):
        asked.append((function, args))
        return function(*args)

    monkeypatch.setattr(ahead, "value", value)
    numbers = dict(dataset_size=600, batch_size=60, iterations=20, epsilon=4.0, delta=1e-4)
    choosing.recommend(**numbers)
    calls = list(choosing.matrices_of(**numbers))
    missing = [call for call in asked if call not in calls]
    assert len(missing) <= len(calls) / 4
    assert {function.__name__ for function, _ in calls} == {"_amplified", "_best_buffers"}
