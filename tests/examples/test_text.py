"""The corpus: the same bytes everywhere, a fair division, a baseline that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import text


def test_the_standard_library_is_there_and_the_same_each_time() -> None:
    first, second = text.load(limit=2_000_000), text.load(limit=2_000_000)
    assert first == second
    assert len(first.train) + len(first.held_out) == 2_000_000
    assert b"import" in first.train and b"import" in first.held_out


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b/two.txt", "c.txt", "a.txt", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert text.read(text.files_under(tmp_path)) == b"a.txtb/two.txtc.txt"
    assert text.read(text.files_under(tmp_path), limit=7) == b"a.txtb/"


def test_every_tenth_block_is_held_out(tmp_path: Path) -> None:
    corpus = text.divide(bytes(range(200)), tmp_path)  # blocks of 20 bytes
    assert corpus.held_out == bytes(range(180, 200))
    assert corpus.train == bytes(range(180))


def test_the_table_of_frequencies_by_hand() -> None:
    # Of 768 training bytes 512 are "a" and 256 are "b"; each of the 256 bytes counts once more.
    corpus = text.Corpus(train=b"aab" * 256, held_out=b"a")
    assert text.table_bits(corpus) == pytest.approx(0.9972, abs=1e-4)  # -log2(513 / 1024)
    unseen = text.Corpus(train=b"aab" * 256, held_out=b"z")
    assert text.table_bits(unseen) == 10  # -log2(1 / 1024)


def test_no_such_path_and_too_little_text_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no text at .*nowhere"):
        text.load(tmp_path / "nowhere")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"the 5 bytes of text in .* are too few"):
        text.load(tmp_path / "short.txt")
