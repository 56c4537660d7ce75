import pytest

from mooncake_simulator.engine.options import OptionsError, parse


def test_the_kv_cache_is_as_large_as_the_profile_unless_overridden() -> None:
    assert parse(["--model", "m", "--block-size", "512"], {}).num_gpu_blocks == 1_400_000 // 512 + 1
    small = parse(["--model", "m", "--num-gpu-blocks-override", "11", "--block-size", "32"], {})
    assert small.max_model_len == 320


def test_a_context_longer_than_the_cache_is_refused_with_the_remedy() -> None:
    with pytest.raises(OptionsError, match=r"--max-model-len 5000: .*160 tokens.*--num-gpu-blocks-override"):
        parse(["--model", "m", "--num-gpu-blocks-override", "11", "--max-model-len", "5000"], {})


def test_unknown_flags_of_vllm_are_kept_for_a_warning() -> None:
    assert parse(["--model", "m", "--dtype", "float32"], {}).unknown_flags == ("--dtype", "float32")


def test_a_multi_connector_is_its_connectors() -> None:
    config = (
        '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":['
        '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"},'
        '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both",'
        '"kv_connector_extra_config":{"save_decode_cache":true}}]}}'
    )
    first, second = parse(["--model", "m", "--kv-transfer-config", config], {}).connectors
    assert (first.name, first.consumes, first.produces) == ("MooncakeConnector", True, False)
    assert second.extra == {"save_decode_cache": True}


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--profile", "abacus"], {}, "--profile abacus: unknown"),
        (["--time-scale", "0"], {}, "--time-scale 0"),
        (["--nnodes", "2"], {}, r"--nnodes 2: must divide .* \(1\)"),
        (["--nnodes", "2", "-tp2"], {}, "--nnodes 2: must divide"),
        (
            ["--nnodes", "2", "--tensor-parallel-size", "2", "--node-rank", "2", "--headless"],
            {},
            "--node-rank 2: must be from 0 to 1",
        ),
        (
            ["--nnodes", "2", "--tensor-parallel-size", "2", "--node-rank", "1"],
            {},
            "--node-rank 1: rank 0 serves, all others need --headless",
        ),
        (["--headless"], {}, "--node-rank 0: rank 0 serves"),
        (["--kv-transfer-config", '{"kv_connector":"X"}'], {}, "kv_connector X is not simulated"),
        (["--kv-transfer-config", '{"kv_connector":"NixlConnector"}'], {}, "needs kv_role"),
        ([], {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "x"}, "VLLM_MOONCAKE_BOOTSTRAP_PORT=x: not a port"),
        ([], {"MOONCAKE_SIMULATOR_FAULTS": "{"}, "MOONCAKE_SIMULATOR_FAULTS is not JSON"),
    ],
)
def test_wrong_values_are_refused_by_name(flags: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        parse(["--model", "m", *flags], environ)
