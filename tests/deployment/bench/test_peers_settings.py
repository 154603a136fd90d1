"""The file that names peers and targets, and which of them are here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deployment.bench.peers.engines import Setup, choose, ours_alone, ours_served, peer_alone, peer_served
from deployment.bench.peers.settings import DEFAULT_FILE, Peer, load_settings
from orca_core.config import EngineConfig
from orca_core.errors import ConfigError

SETUP = Setup("/models/small", "/home", 2, 512)


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    return load_settings(path)


def test_the_packaged_file_is_sound_and_names_no_place_of_its_own() -> None:
    peers, targets = load_settings(DEFAULT_FILE)
    assert {"vllm-cpu", "openvino", "llama.cpp Q8_0"} <= {peer.name for peer in peers}
    assert all(need.startswith("{home}/") for peer in peers for need in peer.needs)
    assert {target.batch for target in targets if target.peer == "openvino"} == {8, 16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[peer", "--config"), ("nonsense = 1", "does not know nonsense"), ("peer = 3", r"tables \[\[peer\]\]"),
        ("[[peer]]\nname = ''", "must be text"), ("[[peer]]\nname = 'a'", "command or a server"),
        ("[[peer]]\nname = 'a'\nprecision = 'fp4'", "bf16, int8, int4"),
        ("[[peer]]\nname = 'a'\ncommand = 'x'", "list of texts"),
        ("[[peer]]\nname = 'a'\ncomand = ['x']", "does not know comand"),
        ("[[peer]]\nname = 'a'\ncommand = ['x']\nbody = 3", "tables"),
        ("[[peer]]\nname = 'a'\ncommand = ['x']\n" * 2, "twice"),
        ("[[target]]\npeer = 'a'\nworkloads = ['trace']\nmetric = 'e2e_ms'\nbatches = [1]\nat_most = 1", "no peer a"),
        ("[[target]]\nworkloads = ['trace']\nmetric = 'e2e_ms'\nbatches = [1]", "one number"),
        ("[[target]]\nworkloads = ['trace']\nmetric = 'tok'\nbatches = [1]\nat_most = 1", "does not compare tok"),
        ("[[target]]\nworkloads = ['trace']\nmetric = 'e2e_ms'\nbatches = []\nat_most = 1", "list of integers"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "none.toml")


def test_who_is_not_here_is_left_out_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    peers = [
        Peer("a", "bf16", ("x",), needs=("{home}/there",)), Peer("b", "bf16", ("x",), needs=("{home}/gone",)),
        Peer("c", "int8", ("x",), needs=("{home}/gone",)), Peer("d", "bf16", ("x",)),
    ]  # fmt: skip
    setup = Setup("m", str(tmp_path), 2)
    here, absent = choose(peers, setup, None, ["bf16"])
    assert ([peer.name for peer in here], absent) == (["a", "d"], {"b": [f"{tmp_path}/gone"]})
    here, absent = choose(peers, setup, ["d"], ["bf16"])
    assert ([peer.name for peer in here], absent) == (["d"], {})


def test_a_peer_is_started_with_the_values_of_the_run() -> None:
    command = ("{home}/run", "{model}", "{model_name}", "{batch}", "{threads}", "{else}")
    body, env = {"model": "{model}", "n": 1}, {"BIND": "{cpus}"}
    peer = Peer("a", "bf16", command, ("serve", "{port}", "{context}"), "/up", (), body, env)
    alone, served = peer_alone(SETUP, peer, lambda: 8123), peer_served(SETUP, peer, lambda: 8123)
    assert alone.argv(4) == ["/home/run", "/models/small", "small", "4", "2", "{else}"]
    assert (alone.env, alone.label) == ({"BIND": "0-1"}, "a")
    assert served.argv(4)[2] == "deployment.bench.peers.openai"
    assert json.loads(served.argv(4)[3]) == {
        "command": ["serve", "8123", "4096"], "port": 8123, "health": "/up", "body": {"model": "/models/small", "n": 1},
    }  # fmt: skip


def test_what_a_peer_has_not_is_done_by_what_it_has() -> None:
    runner, server = Peer("a", "bf16", ("run",)), Peer("b", "bf16", (), ("serve",))
    assert peer_served(SETUP, runner, lambda: 1).argv(1) == ["run"]
    assert peer_alone(SETUP, server, lambda: 1).argv(1)[2] == "deployment.bench.peers.openai"


def test_ours_gets_the_same_model_batch_and_threads() -> None:
    alone, served = ours_alone(SETUP, "int8"), ours_served(Setup("m", "", 2), "bf16")
    config = EngineConfig(**json.loads(alone.argv(16)[3]))
    assert (config.model, config.quantization, config.dtype) == ("/models/small", "int8", "bfloat16")
    assert (config.max_batch_size, config.threads, config.max_batch_tokens) == (16, 2, 512)
    assert (config.n_slots, config.prefix_cache) == (16 * 640, False)
    assert (alone.label, alone.env) == ("orca-serve int8", {"OMP_NUM_THREADS": "2"})
    arguments = json.loads(served.argv(16)[3])
    assert arguments["replicas"] == {"min": 1, "max": 1, "num_cpus": 2}
    assert "max_batch_tokens" not in arguments["engine"]
