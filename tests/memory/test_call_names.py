"""The parts of names of calls and values."""

from lightning_dpx.memory.call_names import call_of, path_of, paths_round


def test_a_name_says_which_call_of_which_module_it_is_of() -> None:
    assert [path_of(name) for name in ("blocks.2#3", "blocks.2", "")] == ["blocks.2", "blocks.2", ""]
    assert [call_of(name) for name in ("blocks.2#3:0", "blocks.2:1", ":0")] == [
        ("blocks.2", 3),
        ("blocks.2", 1),
        ("", 1),
    ]


def test_a_module_is_in_all_that_its_path_begins_with() -> None:
    assert paths_round("net.blocks.2") == ["net.blocks.2", "net.blocks", "net"]
    assert paths_round("") == []
