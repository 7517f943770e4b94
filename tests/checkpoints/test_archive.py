"""Archives: members where they lie, and a line for whatever would leave, fill or deceive."""

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from backend_engine.checkpoint.archive import MAX_GROWTH, TarTree, is_tar, open_files
from backend_engine.errors import ModelLoadError


def write(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], mode: str = "w", **how: Any) -> Path:
    with tarfile.open(path, mode, **how) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def member(name: str, data: bytes = b"data", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        TarTree(path)
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_read_where_they_lie(kind: int, mode: str, tmp_path: Path) -> None:
    wanted = {"a.txt": b"one", "b/" + "n" * 90 + ".bin": bytes(range(256)) * 9, "c/empty": b""}
    if kind != tarfile.USTAR_FORMAT:
        wanted["d/" + "m" * 300] = b"long"
    path = write(tmp_path / "a.tar", [member("./" + name, data) for name, data in wanted.items()], mode, format=kind)
    tree = open_files(path)
    assert is_tar(path)
    assert tree.names() == sorted(wanted)
    for name, data in wanted.items():
        assert tree.read(name, 1 << 20) == data
    with pytest.raises(ModelLoadError, match="has 2304 bytes; expected at most 10"):
        tree.read("b/" + "n" * 90 + ".bin", 10)


def test_a_folder_has_the_same_face(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"one")
    (tmp_path / "a").write_bytes(b"")
    tree = open_files(tmp_path)
    assert tree.names() == ["a", "b/c"]
    assert (tree.read("a", 0), tree.read("b/c", 3)) == (b"", b"one")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("../a"), "member '../a' leaves the archive"),
        (member("b/../../a"), "leaves the archive"),
        (member("/etc/a"), "member '/etc/a' leaves the archive"),
        (member("..\\a"), "leaves the archive"),
        (member("a", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "member 'a' is a link or a device"),
        (member("a", b"", type=tarfile.LNKTYPE, linkname="b"), "member 'a' is a link or a device"),
        (member("a", b"", type=tarfile.CHRTYPE), "member 'a' is a link or a device"),
        (member("a", b"", type=tarfile.FIFOTYPE), "member 'a' is a link or a device"),
    ],
)
def test_members_that_leave_or_point_elsewhere(info: Any, message: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "a.tar", [member("b"), info]), message)


def test_members_that_are_there_twice(tmp_path: Path) -> None:
    refused(write(tmp_path / "a.tar", [member("a"), member("./a")]), "a is there twice")


def test_sparse_members(tmp_path: Path) -> None:
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 50),
               "GNU.sparse.map": "0,4"}  # fmt: skip
    path = write(tmp_path / "a.tar", [member("a", pax_headers=headers)], format=tarfile.PAX_FORMAT)
    refused(path, "member 'a' is sparse")
    info, data = member("a", b"x" * 512)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[156:157] = tarfile.GNUTYPE_SPARSE
    block[386:398], block[398:410], block[483:495] = b"00000000000\0", b"00000001000\0", b"77777777777\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "b.tar").write_bytes(bytes(block) + data + b"\0" * 1024)
    refused(tmp_path / "b.tar", "member 'a' is sparse")


def test_a_compressed_bomb(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nemo", [member("a", b"\0" * 10_000_000)], "w:gz")
    refused(path, f"unpacks to more than {MAX_GROWTH} times its")
    twice = gzip.compress(gzip.compress(b"\0" * 10_000_000))
    path.write_bytes(twice)
    refused(path, "a.nemo")


def header(info: tarfile.TarInfo, size: bytes) -> bytes:
    """A header with these bytes as the size, its checksum right."""
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    block[124:136] = size.ljust(12, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize(
    "size", [b"77777777777", b"\x80" + b"\0" * 6 + b"\x7f" * 5, b"\xff" * 12, b"\xff" * 10 + b"\xfe\0"]
)
def test_sizes_that_cannot_be(kind: bytes, size: bytes, tmp_path: Path) -> None:
    info, _ = member("a", type=kind)
    (tmp_path / "a.tar").write_bytes(header(info, size) + b"\0" * 2048)
    refused(tmp_path / "a.tar", "a.tar")


def test_a_size_below_zero_in_an_extended_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [member("a", pax_headers={"size": "-512"})], format=tarfile.PAX_FORMAT)
    refused(path, "a.tar")


def test_headers_that_follow_headers(tmp_path: Path) -> None:
    info, _ = member("x", type=tarfile.XHDTYPE)
    (tmp_path / "a.tar").write_bytes(header(info, b"0") * 5000 + b"\0" * 1024)
    refused(tmp_path / "a.tar", "a.tar")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_beginnings_and_damage(mode: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20
    path = write(tmp_path / "a.tar", [member("a", data), member("b", data[::-1])], mode)
    whole = path.read_bytes()
    for length in (0, 1, 100, 600, len(data) + 100, len(data) + 700, len(data) + 1200):
        if length < len(whole) - 8:
            path.write_bytes(whole[:length])
            refused(path, "a.tar")


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [member("a"), member("b")])
    data = bytearray(path.read_bytes())
    data[1024 + 150] ^= 1
    path.write_bytes(data)
    refused(path, "a damaged header at byte 1024")


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"GGUF" * 200)
    assert not is_tar(tmp_path / "a")
    assert not is_tar(tmp_path / "none")
    refused(tmp_path / "a", "is not a whole tar archive")
