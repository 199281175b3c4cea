"""Frames: whole, in pieces, cut off, too long, and not of the agreed kind."""

import asyncio
import socket
import threading

import msgspec
import pytest

from shardwise.engine.messages import Cancel, Drain, Drained, Generate, SamplingParams, Tokens
from shardwise.engine.wire import EngineConnection, FrameError, FromEngineReader, connect, pack

TO_ENGINE = [
    Generate(id="a", prompt=[1, 2], sampling=SamplingParams(max_tokens=3, logit_bias={5: 1.0})),
    Cancel(id="b"),
]
FROM_ENGINE = [Tokens(id="a", tokens=[7]), Drained()]


def reader_of(data: bytes, limit_bytes: int = 1000) -> FromEngineReader:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    return FromEngineReader(stream, limit_bytes)


def connection_of(data: bytes, limit_bytes: int = 1000) -> EngineConnection:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
    return EngineConnection(ours, limit_bytes)


async def test_frames_arrive_whole_when_they_come_byte_by_byte():
    stream = asyncio.StreamReader()
    reader = FromEngineReader(stream)
    reading = asyncio.create_task(reader.read())
    for byte in pack(FROM_ENGINE):
        await asyncio.sleep(0)
        assert not reading.done()
        stream.feed_data(bytes([byte]))
    assert await reading == FROM_ENGINE


def test_blocking_side_reads_frames_that_come_in_pieces_and_the_end():
    ours, theirs = socket.socketpair()
    connection, frame = EngineConnection(ours), pack(TO_ENGINE)

    def send() -> None:
        for part in (frame[:2], frame[2:7], frame[7:] + pack([Drain()])[:5], pack([Drain()])[5:], pack([])):
            theirs.sendall(part)
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    assert connection.receive() == TO_ENGINE
    assert connection.receive() == [Drain()]
    assert connection.receive() == []
    assert connection.receive() is None
    sender.join()


async def test_an_end_between_frames_is_no_error_and_an_end_within_one_is():
    frame = pack(FROM_ENGINE)
    reader = reader_of(frame)
    assert await reader.read() == FROM_ENGINE
    assert await reader.read() is None
    for cut in (1, 3, 4, 5, len(frame) - 1):
        with pytest.raises(FrameError, match="ended"):
            await reader_of(frame[:cut]).read()
        with pytest.raises(FrameError, match="ended"):
            connection_of(frame[:cut]).receive()


async def test_a_frame_over_the_limit_is_refused_by_both_sides_before_it_is_read_or_sent():
    longest = pack([Cancel(id="x" * 100)])
    body_bytes = len(longest) - 4
    assert connection_of(longest, limit_bytes=body_bytes).receive() == [Cancel(id="x" * 100)]
    with pytest.raises(FrameError, match=str(body_bytes)):
        pack([Cancel(id="x" * 100)], limit_bytes=body_bytes - 1)
    huge = b"\xff\xff\xff\xff"
    with pytest.raises(FrameError, match="4294967295"):
        await reader_of(huge).read()
    with pytest.raises(FrameError, match="4294967295"):
        connection_of(huge).receive()


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode([{"type": "Unknown"}]), msgspec.msgpack.encode(7)]
)
async def test_what_is_no_message_is_an_error(body: bytes):
    frame = len(body).to_bytes(4, "big") + body
    with pytest.raises(FrameError, match="cannot be read"):
        await reader_of(frame).read()
    with pytest.raises(FrameError, match="cannot be read"):
        connection_of(frame).receive()


def test_connect_waits_for_the_listener_and_gives_up_in_time(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("s") / "s"
    with pytest.raises(FileNotFoundError):
        connect(path, timeout_s=0.1)
    listener = socket.socket(socket.AF_UNIX)

    def listen() -> None:
        listener.bind(str(path))
        listener.listen()

    timer = threading.Timer(0.2, listen)
    timer.start()
    connection = connect(path, timeout_s=5)
    peer, _ = listener.accept()
    connection.send([Drained()])
    assert peer.recv(100) == pack([Drained()])
    for end in (connection, peer, listener):
        end.close()
