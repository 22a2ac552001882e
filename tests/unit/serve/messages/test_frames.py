"""Frames are received correctly wherever the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.decide.control.message_order import MessageLostError
from baton.move.ipc.frames import FRAME_BYTES_MAX, ControlReader, ControlWriter, FrameReader, frame


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


@given(messages=st.lists(st.binary(max_size=40), max_size=8), cuts=st.lists(st.integers(0, 400), max_size=30))
def test_any_split_of_the_stream_gives_the_same_messages(messages: list[bytes], cuts: list[int]) -> None:
    reader = FrameReader()
    stream = b"".join(frame(message) for message in messages)
    assert [message for piece in pieces(stream, cuts) for message in reader.feed(piece)] == messages
    assert list(reader.feed(frame(b"next"))) == [b"next"], "something was left in the buffer"


@given(messages=st.lists(st.binary(max_size=20), max_size=4))
def test_byte_by_byte_a_message_comes_with_its_last_byte(messages: list[bytes]) -> None:
    reader = FrameReader()
    for message in messages:
        *head, last = [bytes([byte]) for byte in frame(message)]
        assert [found for byte in head for found in reader.feed(byte)] == []
        assert list(reader.feed(last)) == [message]


def test_an_incomplete_message_is_kept_back() -> None:
    reader = FrameReader()
    assert list(reader.feed(frame(b"whole") + frame(b"half")[:-1])) == [b"whole"]
    assert list(reader.feed(b"")) == []
    assert list(reader.feed(b"f")) == [b"half"]


def test_a_length_that_no_message_has_is_refused_before_anything_is_kept() -> None:
    """Four bytes of another protocol must not announce a message of gigabytes."""
    with pytest.raises(ValueError, match="more than the"):
        list(FrameReader().feed(b"GET / HTTP/1.1\r\n"))
    with pytest.raises(ValueError, match=str(FRAME_BYTES_MAX + 1)):
        list(FrameReader().feed((FRAME_BYTES_MAX + 1).to_bytes(4, "little")))
    assert list(FrameReader().feed(FRAME_BYTES_MAX.to_bytes(4, "little"))) == []


@given(
    messages=st.lists(st.binary(max_size=20), min_size=1, max_size=6),
    repeated=st.lists(st.integers(0, 5), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_a_repeated_control_message_is_handled_once(
    messages: list[bytes], repeated: list[int], cuts: list[int]
) -> None:
    """A message may come again at once, or after later ones."""
    writer, reader = ControlWriter(), ControlReader()
    frames = [writer.frame(message) for message in messages]
    stream = b"".join(
        b"".join([sent, *(frames[again % (place + 1)] for again in repeated)]) for place, sent in enumerate(frames)
    )
    assert [message for piece in pieces(stream, cuts) for message in reader.feed(piece)] == messages


@given(messages=st.lists(st.binary(max_size=20), min_size=2, max_size=6), lost=st.integers(0, 4))
def test_no_message_is_handled_after_a_lost_one(messages: list[bytes], lost: int) -> None:
    writer, reader = ControlWriter(), ControlReader()
    frames = [writer.frame(message) for message in messages]
    lost %= len(frames) - 1
    assert [message for sent in frames[:lost] for message in reader.feed(sent)] == messages[:lost]
    for late in frames[lost + 1 :]:
        with pytest.raises(MessageLostError, match=f"control message {lost} was lost: message"):
            list(reader.feed(late))
