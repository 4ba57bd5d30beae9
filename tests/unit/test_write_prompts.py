"""Prompts for training text."""

import collections

from tools.write_prompts import STEP_BY_STEP, documented_functions, write_prompts


def test_all_kinds_in_equal_shares_and_none_twice():
    rows = write_prompts(600, seed=0)
    texts = [row["turns"][0] for row in rows]
    assert len(set(texts)) == len({row["id"] for row in rows}) == 600
    kinds = collections.Counter(row["id"].rpartition("-")[0] for row in rows)
    assert set(kinds) == {"word", "code", "chat", "complete", "maths"}
    assert min(kinds.values()) > 80 and kinds["chat"] > 150
    assert all(t.endswith(STEP_BY_STEP) for r in rows for t in r["turns"] if r["id"][:4] == "word")


def test_a_seed_gives_the_same_prompts_and_leaves_no_placeholder():
    rows = write_prompts(300, seed=3)
    assert rows == write_prompts(300, seed=3) != write_prompts(300, seed=4)
    text = "\n".join(row["turns"][0] for row in rows)
    assert not any(mark in text for mark in ("{t}", "{u}", "{n}", "{m}", "{coll}", "{cond}"))


def test_functions_of_the_standard_library_are_code():
    names = [name for name, _, _ in documented_functions()]
    assert len(names) > 300 and "wrap" in names
