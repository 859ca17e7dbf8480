import logging

from lightning_dpx.lightning.silence_lightning import quiet_lightning


def test_lightning_says_nothing_but_warnings_and_speaks_again_after() -> None:
    talker = logging.getLogger("lightning.pytorch")
    before = talker.level
    with quiet_lightning():
        assert not talker.isEnabledFor(logging.INFO)
        assert talker.isEnabledFor(logging.WARNING)
    assert talker.level == before
