"""The command line: flags and their aliases to a config, and every wrong one as one line and exit code 2."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main, make_parser, serve_config
from shardwise.commands import verify
from shardwise.config import ConfigError, ServeConfig


def config_of(*arguments: str) -> ServeConfig:
    return serve_config(make_parser().parse_args(["serve", *arguments]))


def test_without_flags_the_defaults_of_the_config_hold():
    assert config_of() == ServeConfig(model="")


@pytest.mark.parametrize("flag", ["--tp", "--tp-size", "--tensor-parallel-size", "-tp"])
def test_ranks_by_any_name(flag: str):
    assert config_of("m", flag, "3") == ServeConfig(model="m", ranks=3)


@pytest.mark.parametrize("arguments", [["m"], ["--model", "m"], ["--model-path", "m"], ["m", "--model", "m"]])
def test_the_model_by_any_name(arguments: list[str]):
    assert config_of(*arguments).model == "m"


def test_short_forms_of_the_flags_of_pictures():
    assert config_of("m").vision == "auto"
    assert config_of("m", "--text-model-only").vision == "off"
    assert config_of("m", "--allow-remote-images").allow_remote_images == "public"


def test_all_flags_reach_the_config():
    text = (
        "m --tp 2 --ratio 5,3 --ratio expert=1,0 --device cpu --dtype float32 --load-format dummy --kernels reference "
        "--comm torch --max-model-len 100 --max-num-seqs 4 --max-num-batched-tokens 64 --gpu-memory-utilization 0.5 "
        "--kv-tokens 500 --page-tokens 16 --seed 7 --host 0.0.0.0 --port 0 --served-model-name a b --api-key k "
        "--drain-seconds 2.5 --log-level debug --no-graphs --no-overlap --no-shortlist --reasoning-parser none "
        "--max-body-bytes 1000 "
        "--gpu 1,GPU-8f2c --gpu-spec 24GiB:936GB/s --objective context "
        "--vision replicate --vision-cache-tokens 9 --max-image-pixels 5000 --max-images 3 --allow-remote-images any "
        "--allowed-media-path /pictures --kv-cache-dtype fp8 --no-ui "
        "--tool-call-parser xml --max-queued-requests 9 --grammar-backend llguidance "
        "--no-prefix-cache --snapshot-rows 3 --snapshot-every 256 --host-cache-gib 1.5 "
        "--experts hybrid --expert-slots 40 --bank-cache /banks --kv-reserve-tokens 300"
    )
    assert config_of(*text.split()) == ServeConfig(
        model="m", ranks=2, ratio=(5, 3), group_ratios={"expert": (1, 0)}, device="cpu", dtype="float32",
        load_format="dummy", kernels="reference", comm="torch", max_model_len=100, max_num_seqs=4,
        max_num_batched_tokens=64, gpu_memory_utilization=0.5, kv_tokens=500, page_tokens=16, seed=7, host="0.0.0.0",
        port=0, served_model_name=("a", "b"), api_key="k", drain_seconds=2.5, log_level="debug",
        graphs=False, overlap=False, shortlist=False, kv_cache_dtype="fp8",
        reasoning_parser="none", max_body_bytes=1000, ui=False,
        vision="replicate", vision_cache_tokens=9, max_image_pixels=5000, max_images=3, allow_remote_images="any",
        allowed_media_path="/pictures", gpu=("1", "GPU-8f2c"),
        gpu_spec="24GiB:936GB/s", objective="context", prefix_cache=False, snapshot_rows=3, snapshot_every=256,
        host_cache_gib=1.5,
        tool_call_parser="xml", max_queued_requests=9, grammar_backend="llguidance",
        experts="hybrid", expert_slots=40, bank_cache="/banks", kv_reserve_tokens=300,
    )  # fmt: skip
    unlike = {
        "model",
        "ranks",
        "group_ratios",
        "graphs",
        "overlap",
        "shortlist",
        "device_profile",
        "ui",
        "prefix_cache",
    }
    negated = {"no-graphs", "no-overlap", "no-shortlist", "no-ui", "no-prefix-cache"}
    fields = {*ServeConfig.__struct_fields__, *negated} - unlike
    assert all(f"--{name.replace('_', '-')}" in text for name in fields)


def test_fused_is_another_name_for_resident_experts():
    assert config_of("m").experts == "auto"
    assert config_of("m", "--moe-backend", "fused").experts == "resident"
    assert config_of("m", "--moe-backend", "offload").experts == "offload"


def test_graphs_can_be_left_out():
    assert config_of().graphs
    assert not config_of("--enforce-eager").graphs


def test_facts_of_devices_leave_the_number_of_ranks_to_us():
    assert config_of("--gpu", "0,1").ranks == 0
    assert config_of("--gpu", "0,1", "--tp", "2").ranks == 2
    assert config_of("--device-profile", "cards.toml") == ServeConfig(model="", ranks=0, device_profile="cards.toml")


def test_a_ratio_says_how_many_ranks():
    assert config_of("--ratio", "5:3:2").ranks == 3
    assert config_of("--ratio", "delta=1,1").ranks == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tp 0", "'0' is not a whole number of 1 or more"),
        ("--tp two", "'two' is not a whole number"),
        ("--tp 3 --ratio 5,3", "--ratio 5,3: 2 weights for 3 ranks"),
        ("--tp 2 --ratio expert=1,2,3", "--ratio expert=1,2,3: 3 weights for 2 ranks"),
        ("--ratio 5,x", "'5,x' is not a list of weights"),
        ("--ratio 0,0", "'0,0' is not a list of weights"),
        ("--ratio 5,-3", "'5,-3' is not a list of weights"),
        ("--ratio nan,1", "'nan,1' is not a list of weights"),
        ("--ratio 1,1 --ratio 2,1", "given twice"),
        ("--ratio 5,0", "a rank with nothing at all"),
        ("--gpu 0,,1", "'0,,1' is not a list such as 0,1"),
        ("--gpu-spec 1GiB:1GB/s --device-profile x.toml", "give one of them"),
        ("--gpu 0 --device cpu", "--gpu 0: ranks run on the CPU here"),
        ("--gpu-spec 24GiB --device cpu", "'24GiB' is no device"),
        ("--device-profile /no/such.toml --device cpu", "/no/such.toml: No such file"),
        ("--port 70000", "'70000' is not a whole number from 0 to 65535"),
        ("--gpu-memory-utilization 1.5", "'1.5' is not a number from 0.01 to 1"),
        ("--gpu-memory-utilization nan", "'nan' is not a number"),
        ("--max-num-seqs -1", "'-1' is not a whole number"),
        ("--max-model-len 200 --kv-tokens 100", "--max-model-len 200 is more than --kv-tokens 100"),
        ("--dtype int8", "int8"),
        ("--device tpu", "tpu"),
        ("--tensor-parallel 2", "unrecognized arguments: --tensor-parallel"),
        ("a --model b", "two models: a and --model b"),
        ("/no/such/folder", "/no/such/folder"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(arguments: str, words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", *("--port 0 " + arguments).split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardwise: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_no_command_or_an_unknown_one_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err.count("shardwise: error:") == 2


def test_a_port_in_use_is_told_at_once(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_verify_needs_ranks_to_compare():
    options = make_parser().parse_args(["verify", "m"])
    with pytest.raises(ConfigError, match="--tp 2"):
        verify.run(options, serve_config(options))


def test_flags_are_checked_without_importing_torch():
    """Or a wrong flag would take seconds to be told."""
    script = (
        "import sys; from shardwise.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'fastapi', 'huggingface_hub'} & set(sys.modules); "
        "sys.exit(10 if heavy else code)"
    )
    source = str(Path(__file__).parents[2] / "src")
    for arguments in (["serve", "--tp", "0"], ["serve", "--host", "256.1.1.1"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env={"PYTHONPATH": source}
        )
        assert done.returncode == 2, done.stderr
