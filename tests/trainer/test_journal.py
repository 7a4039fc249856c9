"""The journal on a real disk: what was acknowledged is there, and damage is never passed over."""

import asyncio
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_megatron.data.journal import Journal, scan, segment_name
from skyrl_megatron.errors import CheckpointError, JournalError
from tests.trainer import journal_writer
from tests.trainer.lives import killed

LIVES = 10


def filled(folder, payloads, **options):
    journal = Journal(folder, **options)
    for future in [journal.submit(payload) for payload in payloads]:
        future.result()
    journal.close()


def contents(folder):
    journal = Journal(folder)
    try:
        return [payload for _, payload in journal.records()]
    finally:
        journal.close()


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.seg")}


def restore(folder, files):
    for path in folder.glob("*.seg"):
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_a_flush_serves_many_appends(tmp_path):
    async def append_all():
        return await asyncio.gather(*(journal.append(lambda i=i: [str(i).encode()]) for i in range(500)))

    journal = Journal(tmp_path)
    assert asyncio.run(append_all()) == list(range(500))
    flushes = journal.log.flushes
    journal.close()
    assert flushes < 100
    assert contents(tmp_path) == [str(i).encode() for i in range(500)]


def test_a_record_that_cannot_be_made_leaves_the_journal_open(tmp_path):
    """Its own caller gets the error, whatever it is: nothing was written."""

    def lost():
        raise OSError("the host is gone")

    journal = Journal(tmp_path)
    with pytest.raises(OSError, match="the host is gone"):
        asyncio.run(journal.append(lost))
    assert journal.submit(b"next").result() == 0
    journal.close()
    assert contents(tmp_path) == [b"next"]


def test_an_append_is_on_the_disk_when_it_ends(tmp_path, monkeypatch):
    synced, fdatasync = [], os.fdatasync

    def noted(descriptor):
        fdatasync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", noted)
    journal = Journal(tmp_path)
    for number in range(3):
        journal.submit(b"payload %d" % number).result()
        [segment] = tmp_path.glob("*.seg")
        assert synced[-1:] == [segment.stat().st_size]
    journal.close()


def test_parts_of_a_record_are_joined(tmp_path):
    filled(tmp_path, [])
    journal = Journal(tmp_path)
    parts = [bytes([i % 251]) * (i % 3) for i in range(3000)]  # more than one writev takes
    journal.submit(*parts).result()
    journal.close()
    assert contents(tmp_path) == [b"".join(parts)]


def test_a_tail_that_was_cut_off_at_any_byte(tmp_path):
    payloads = [b"first", b"", b"SKRJ" * 9, bytes(30)]
    filled(tmp_path, payloads)
    ((name, data),) = files_of(tmp_path).items()
    records, size = scan(tmp_path / name, 1, data, last=True)
    assert size == len(data)
    ends = [record.offset + record.length + 4 for record in records]
    for cut in range(len(data)):
        for tail in (b"", bytes(len(data) - cut)):  # also of a file that was enlarged before it was filled
            whole = sum(end <= cut for end in ends)
            found, size = scan(tmp_path / name, 1, data[:cut] + tail, last=True)
            assert (found, size) == (records[:whole], ends[whole - 1] if whole else 0), (cut, tail)
            if cut % 16:
                continue
            restore(tmp_path, {name: data[:cut] + tail})
            assert contents(tmp_path) == payloads[: max(whole - 1, 0)], (cut, tail)
            filled(tmp_path, [b"more"])
            assert contents(tmp_path) == [*payloads[: max(whole - 1, 0)], b"more"]


def test_any_flipped_bit_is_named(tmp_path):
    filled(tmp_path, [b"first", b"", bytes(5), b"last"])
    ((name, data),) = files_of(tmp_path).items()
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            (tmp_path / name).write_bytes(flipped)
            with pytest.raises(JournalError, match=rf"{name} is damaged at byte \d+: .*; \d records before it"):
                Journal(tmp_path)
            assert (tmp_path / name).read_bytes() == flipped  # left as it was found


def test_bits_flipped_in_a_closed_segment_or_bytes_missing(tmp_path):
    filled(tmp_path, [bytes(100)] * 8, segment_bytes=400)
    files = files_of(tmp_path)
    assert len(files) >= 4
    name = segment_name(2)
    for cut in range(len(files[name])):
        restore(tmp_path, files | {name: files[name][:cut]})
        with pytest.raises(JournalError, match=f"{name} has {cut} bytes, but 0000.*.seg lists it with"):
            Journal(tmp_path)
    flipped = bytearray(files[name])
    flipped[300] ^= 4
    restore(tmp_path, files | {name: flipped})
    with pytest.raises(JournalError, match=f"{name} is damaged at byte"):
        Journal(tmp_path)
    restore(tmp_path, {key: data for key, data in files.items() if key != name})
    with pytest.raises(JournalError, match=f"{name} is missing"):
        Journal(tmp_path)
    with pytest.raises(JournalError, match="found record 0 of segment 3, expected record 0 of segment 2"):
        scan(tmp_path / name, 2, files[segment_name(3)], last=False)


def test_a_record_that_is_missing_in_the_middle(tmp_path):
    filled(tmp_path, [b"one", b"two", b"six"])
    ((name, data),) = files_of(tmp_path).items()
    records, _ = scan(tmp_path / name, 1, data, last=True)
    first, second = (records[i].offset + records[i].length + 4 for i in (1, 2))
    restore(tmp_path, {name: data[:first] + data[second:]})
    with pytest.raises(JournalError, match="found record 3 of segment 1, expected record 2"):
        Journal(tmp_path)


def test_compaction_frees_what_is_released_and_copies_the_rest(tmp_path):
    journal = Journal(tmp_path, segment_bytes=1000)
    for future in [journal.submit(i.to_bytes() * 200) for i in range(40)]:
        future.result()
    before = sum(journal.log.sizes.values())
    journal.release([i for i in range(40) if i % 10])
    journal.compact().result()
    assert sum(journal.log.sizes.values()) < before / 2
    expected = [i.to_bytes() * 200 for i in range(40) if i % 10 == 0]
    assert [payload for _, payload in journal.records()] == expected
    journal.close()
    last_segment = [36, 37, 38, 39]  # which compaction leaves alone
    assert [payload for payload in contents(tmp_path) if payload[0] not in last_segment] == expected


def test_sequences_are_not_used_again(tmp_path):
    journal = Journal(tmp_path, segment_bytes=100)
    for _ in range(3):
        last = journal.submit(bytes(80)).result()
    journal.release(range(last + 1))
    journal.compact().result()
    journal.submit(b"").result()
    journal.release(range(last + 2))
    journal.compact().result()
    journal.close()
    journal = Journal(tmp_path)
    assert journal.submit(b"next").result() > last + 1
    journal.close()


@pytest.mark.process
def test_one_writer_only(tmp_path):
    journal = Journal(tmp_path, setting="trainer.ckpt_path")
    with pytest.raises(CheckpointError, match="is already being written by this process"):
        Journal(tmp_path)
    code = f"from skyrl_megatron.data.journal import Journal; Journal({str(tmp_path)!r}, setting='a.key')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert other.returncode and f"is being written by process {os.getpid()} on" in other.stderr.splitlines()[-1]
    assert "another a.key" in other.stderr.splitlines()[-1]
    journal.close()
    (tmp_path / ".lock").write_text("process 1 on a host that is gone\n")
    Journal(tmp_path).close()
    with pytest.raises(JournalError, match="is closed"):
        journal.submit(b"")


@pytest.mark.process
def test_a_full_disk_ends_it_with_what_is_there_kept(tmp_path):
    """A limit on the size of files stands for the disk: both fail a write after a part of it."""
    code = f"""
import resource, signal
from skyrl_megatron.errors import JournalError
from skyrl_megatron.data.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal({str(tmp_path)!r})
done = 0
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    while True:
        journal.submit(b"x" * 999).result()
        done += 1
except JournalError as error:
    print(done, error)
try:
    journal.submit(b"").result()
except JournalError as error:
    print("again", error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, second = run.stdout.splitlines()
    done = int(first.split()[0])
    assert done == 9 and "cannot be written: [Errno 27] File too large; free space there" in first
    assert second.removeprefix("again ") == first.removeprefix(f"{done} ")
    assert contents(tmp_path) == [b"x" * 999] * done


@pytest.mark.process
def test_killed_at_any_time(tmp_path):
    """A process that appends, releases and compacts is killed, again and again; each life checks what the one before
    acknowledged, and that nothing else came back."""
    rng = random.Random(0)
    acknowledged, released = {}, set()
    for life in range(LIVES):
        said = killed(journal_writer.write, str(tmp_path), life, after=rng.randrange(1, 60))
        acknowledged |= {what[1]: what[2] for what in said if what[0] == "appended"}
        released |= {sequence for what in said if what[0] == "releasing" for sequence in what[1]}
        journal = Journal(tmp_path)
        found = {sequence: payload.decode().split(":")[0] for sequence, payload in journal.records()}
        journal.close()
        assert acknowledged.keys() - released <= found.keys()
        assert all(found[sequence] == acknowledged[sequence] for sequence in found.keys() & acknowledged.keys())
    assert len(acknowledged) > 10 * LIVES


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_order_of_appends_releases_compaction_and_reopening(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    journal, model = Journal(folder, segment_bytes=300), {}
    released: dict[int, bytes] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["append", "append", "release", "compact", "reopen"]))
        if action == "append":
            payload = data.draw(st.binary(max_size=120))
            model[journal.submit(payload).result()] = payload
        elif action == "release" and model:
            sequence = data.draw(st.sampled_from(sorted(model)))
            released[sequence] = model.pop(sequence)
            journal.release([sequence])
        elif action == "compact":
            journal.compact().result()
        elif action == "reopen":
            journal.close()
            journal = Journal(folder, segment_bytes=300)
            found = dict(journal.records())
            assert found.items() >= model.items() and (found.items() - model.items()) <= released.items()
            journal.release(found.keys() - model.keys())
    journal.compact().result()
    assert dict(journal.records()) == model
    journal.close()
