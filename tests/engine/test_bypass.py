"""When the host asks whether drafts pay."""

from dspark_jax.engine.bypass import Bypass


def test_asks_when_what_it_was_told_is_used_up_or_no_longer_holds():
    bypass, answers, asked = Bypass(), [3, 0, 0, 2, 4], []

    def ask() -> int:
        asked.append(answers[len(asked)])
        return asked[-1]

    got = [bypass.begins(ask) for _ in range(6)]
    assert got == [True, True, True, False, False, True] and asked == [3, 0, 0, 2]
    bypass.forget()
    assert [bypass.begins(ask) for _ in range(4)] == [True] * 4 and asked == [3, 0, 0, 2, 4]
