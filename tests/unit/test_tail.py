"""Lines of a file that grows."""

from __future__ import annotations

from pathlib import Path

from mindio_tft_patch.launch.tail import Tail


def test_a_line_is_handed_out_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.lines()) == []
    with path.open("ab") as file:
        for content, complete in ((b"one\ntw", ["one"]), (b"o\r\n\xff\n", ["two", "�"]), (b"", [])):
            file.write(content)
            file.flush()
            assert list(tail.lines()) == complete
