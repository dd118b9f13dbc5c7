"""Test the doors through which files of others are read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megafp8.foreign import (
    MAX_DEPTH,
    Fields,
    ForeignFileError,
    check_members,
    member,
    parse_json,
    parse_yaml,
    read_bytes,
    read_object,
)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
def test_depth_is_limited(parse: object) -> None:
    assert callable(parse)
    parse(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 500, 50_000):
        with pytest.raises(ForeignFileError, match="deeper than 64 levels"):
            parse(nested(depth))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ('{"a": 1e5', "is not JSON"),
        ("\x80", "is not JSON"),
        (f'{{"a": {"9" * 41}}}', "a number of 41 digits"),
        (f'{{"a": {"9" * 9000}}}', "a number of 9000 digits"),
        ('{"a": "\\ud800"}', "half of a pair"),
    ],
)
def test_json_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ForeignFileError, match=reason):
        parse_json(text.encode("latin-1"))


def test_json_that_is_read() -> None:
    content = '\ufeff{"a": "\\ud83d\\ude00", "b": [1, 2.5, null, true, 1e999]}'.encode()
    assert parse_json(content) == {"a": "😀", "b": [1, 2.5, None, True, float("inf")]}


def test_yaml_aliases_that_stand_for_little_are_read() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: [*x, *x]\n") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert parse_yaml("base: &b {lr: 1}\nuse: {<<: *b, n: 2}\n")["use"] == {"lr": 1, "n": 2}


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ForeignFileError, match="it is a FIFO, not a regular file"):
        read_bytes(tmp_path / "fifo")
    with pytest.raises(ForeignFileError, match="it is a device, not a regular file"):
        read_bytes(Path("/dev/zero"))
    (tmp_path / "large").write_bytes(b"[1, 2]")
    with pytest.raises(ForeignFileError, match="it has 6 bytes; at most 5 are read"):
        read_object(tmp_path / "large", 5)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "missing")


def make_special(folder: Path, kind: str) -> None:
    outside = folder.parent / "secret.txt"
    outside.write_text("secret")
    path = folder / "x.json"
    match kind:
        case "link":
            path.symlink_to(outside)
        case "relative link":
            path.symlink_to("../secret.txt")
        case "link through a folder":
            (folder / "sub").symlink_to("..")
            path.symlink_to("sub/secret.txt")
        case "dangling link":
            path.symlink_to("nothing")
        case "circle":
            path.symlink_to("x.json")
        case "FIFO":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.relpath(path))
        case "folder":
            path.mkdir()


@pytest.mark.parametrize(
    "kind",
    [
        "link",
        "relative link",
        "link through a folder",
        "dangling link",
        "circle",
        "FIFO",
        "device",
        "socket",
        "folder",
    ],
)
def test_a_special_file_of_a_folder_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make_special(folder, kind)
    with pytest.raises(ForeignFileError, match=r"x\.json"):
        member(folder, "x.json")
    if kind != "folder":
        with pytest.raises(ForeignFileError):
            check_members(folder)


def test_a_link_inside_of_the_folder_and_the_caches_blobs_are_followed(tmp_path: Path) -> None:
    home = tmp_path / "models--a--b" / "snapshots" / "0f"
    blobs = tmp_path / "models--a--b" / "blobs"
    home.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (home / "config.json").symlink_to("../../blobs/abc")
    (home / "same.json").symlink_to("config.json")
    assert member(home, "config.json") == home / "config.json"
    assert member(home, "same.json") == home / "same.json"
    assert member(home, "missing.json") is None
    check_members(home)
    by_link = tmp_path / "link"
    by_link.symlink_to(home)
    assert member(by_link, "config.json") is not None


@pytest.mark.parametrize("place", ["blobs is a link", "the blob is a link", "another model's"])
def test_a_cache_that_leads_out_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "abc").write_text("secret")
    root = tmp_path / "models--a--b"
    home = root / "snapshots" / "0f"
    home.mkdir(parents=True)
    if place == "blobs is a link":
        (root / "blobs").symlink_to("../private")
    else:
        (root / "blobs").mkdir()
        (root / "blobs" / "abc").symlink_to("../../private/abc")
    target = "../../../private/abc" if place == "another model's" else "../../blobs/abc"
    (home / "vocab.json").symlink_to(target)
    with pytest.raises(ForeignFileError, match="outside of the folder"):
        member(home, "vocab.json")


def test_fields_name_the_key_the_value_and_what_belongs_there() -> None:
    fields = Fields({"n": 2.7, "flag": "false", "eps": -1, "nan": float("nan"), "text": 5, "o": []})
    for call, reason in (
        (lambda: fields.whole("n", 1, 9), "n is 2.7, not a whole number from 1 to 9"),
        (lambda: fields.whole("flag", 0, 1), 'flag is "false", not a whole number from 0 to 1'),
        (lambda: fields.flag("flag"), 'flag is "false", not true or false'),
        (lambda: fields.number("eps", above=0), "eps is -1, not a finite number above 0"),
        (lambda: fields.number("nan", at_least=0, below=1), "nan is NaN, not a finite number"),
        (lambda: fields.text("text"), "text is 5, not a text"),
        (lambda: fields.section("o"), r"o is \[\], not an object"),
        (lambda: fields.whole("gone", 1, 2), "gone is missing"),
    ):
        with pytest.raises(ForeignFileError, match=reason):
            call()
    assert fields.whole("gone", 1, 2, 7) == 7
    assert Fields({"x": 1}).number("x") == 1.0
    assert Fields({"x": True}).flag("x") is True
