"""Both dialects of the command line: every row, equivalence, and what is refused with which words."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kitfox.config import SPECULATION_METHODS, EngineConfig
from kitfox.errors import ConfigError
from kitfox.flags import (
    FLAGS,
    Dialect,
    Flag,
    ServerOptions,
    build_engine_config,
    build_parser,
    default_of,
    in_dialect,
    size,
)

DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang")
ROWS = [
    pytest.param(dialect, flag, id=f"{dialect}{spellings[0]}")
    for dialect in DIALECTS
    for flag in FLAGS
    if (spellings := flag.spellings(dialect))
]
# A legal text that is not the default, and what it becomes.
SAMPLES: dict[str, tuple[str, object]] = {
    "model.model": ("some/model", "some/model"),
    "model.served_model_names": ("fox", ("fox",)),
    "model.max_model_len": ("4K", 4096),
    "model.dtype": ("half", "float16"),
    "model.quantization": ("int8", "int8"),
    "model.tokenizer": ("here", "here"),
    "model.revision": ("v2", "v2"),
    "model.load_format": ("dummy", "dummy"),
    "model.chat_template": ("t.jinja", "t.jinja"),
    "model.seed": ("7", 7),
    "server.host": ("0.0.0.0", "0.0.0.0"),
    "server.port": ("9000", 9000),
    "server.shutdown_timeout_s": ("2.5", 2.5),
    "server.log_level": ("debug", "debug"),
    "server.log_format": ("json", "json"),
    "server.tool_call_parser": ("qwen25", "hermes"),
    "server.reasoning_parser": ("deepseek_r1", "think"),
    "server.otlp_traces_endpoint": ("http://here:4318/v1/traces", "http://here:4318/v1/traces"),
    "model.pooling": ("last", "last"),
    "server.storage_dir": ("/srv/kitfox", "/srv/kitfox"),
    "server.profile_dir": ("/srv/profiles", "/srv/profiles"),
    "server.uds": ("/run/kitfox", "/run/kitfox"),
    "server.root_path": ("/models/", "/models"),
    "server.max_body_bytes": ("1M", 1 << 20),
    "server.max_header_bytes": ("4K", 4096),
    "server.max_header_count": ("50", 50),
    "server.api_keys": ("secret", ("secret",)),
    "server.admin_api_key": ("secret", "secret"),
    "server.allowed_origins": ("https://here", ("https://here",)),
    "server.allowed_media_domains": ("here.example", ("here.example",)),
    "server.allowed_methods": ("GET", ("GET",)),
    "server.allowed_headers": ("x-mine", ("x-mine",)),
    "server.ssl_keyfile_password": ("secret", "secret"),
    "server.ssl_ca_certs": (__file__, __file__),
    "server.ssl_cert_reqs": ("2", 2),
    "model.generation_config": ("vllm", "vllm"),
    "model.override_generation_config": ('{"top_k":5}', {"top_k": 5}),
    "model.stream_interval": ("4", 4),
    "max_logprobs": ("5", 5),
    "trace_capacity": ("100", 100),
    "cache.organisation": ("none", "none"),
    "cache.block_size": ("16", 16),
    "cache.memory_fraction": ("0.8", 0.8),
    "cache.memory_bytes": ("2G", 2 << 30),
    "cache.num_blocks": ("100", 100),
    "cache.dtype": ("bf16", "bfloat16"),
    "cache.eviction_policy": ("slru", "slru"),
    "scheduler.max_num_seqs": ("3", 3),
    "scheduler.max_num_batched_tokens": ("1k", 1000),
    "scheduler.long_prefill_token_threshold": ("64", 64),
    "scheduler.policy": ("lpm", "lpm"),
    "scheduler.max_num_queued_requests": ("9", 9),
    "structured_output.backend": ("guidance", "llguidance"),
    "structured_output.compile_timeout_s": ("2.5", 2.5),
    "structured_output.compile_memory_bytes": ("1G", 1 << 30),
    "structured_output.max_whitespace": ("2", 2),
    "speculation.method": ("NGRAM", "ngram"),
    "speculation.num_draft_tokens": ("5", 5),
    "adapters.modules": ("sql=/adapters/sql", (("sql", "/adapters/sql"),)),
    "adapters.max_rank": ("8", 8),
    "adapters.max_loaded": ("4", 4),
    "scheduler.max_running_adapters": ("2", 2),
    "device.device": ("cuda:1", "cuda:1"),
    "device.num_threads": ("2", 2),
}
STAND_FOR_OTHERS = {
    "cache.prefix_caching",
    "cache.max_total_tokens",
    "server.api_key_file",
    "server.ssl_keyfile",  # these two need each other
    "server.ssl_certfile",
    "scheduler.max_prefill_tokens",
    "scheduler.by_priority",
    "scheduler.low_values_first",
    "structured_outputs_config",
    "speculation.config",
    "speculation.min_length",
    "speculation.max_length",
    "speculation.model",
    "speculation.num_steps",
}


METHODS = ", ".join(SPECULATION_METHODS)


def parse(dialect: Dialect, line: str) -> tuple[EngineConfig, ServerOptions]:
    needed = "" if dialect == "vllm" or "--model" in line else "--model-path M "
    return build_engine_config(dialect, (needed + line).split())


def refusal(dialect: Dialect, line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(dialect, line)
    return caught.value.message


def value_at(result: tuple[EngineConfig, ServerOptions], target: str) -> object:
    section, _, name = target.rpartition(".")
    owner = result[1] if section == "server" else getattr(result[0], section) if section else result[0]
    return getattr(owner, name)


class TestTable:
    @pytest.mark.parametrize(("dialect", "flag"), ROWS)
    def test_every_spelling_of_every_row(self, dialect: Dialect, flag: Flag) -> None:
        """Supported rows set their setting, the others are refused; with = or a space, dashes or underscores."""
        for word in flag.spellings(dialect):
            if flag.unsupported:
                assert flag.unsupported in refusal(dialect, word if flag.switch is not None else f"{word} something")
                for harmless in flag.harmless:
                    assert parse(dialect, f"{word} {harmless}") == parse(dialect, "")
            elif flag.target in STAND_FOR_OTHERS:
                assert flag.target not in SAMPLES  # tested one by one below
            elif flag.switch is not None:
                result = parse(dialect, word)
                assert not flag.target or value_at(result, flag.target) == flag.switch
            else:
                text, value = SAMPLES[flag.target]
                assert default_of(flag, dialect) != value
                dashes = len(word) - len(word.lstrip("-"))
                underscored = word[:dashes] + word[dashes:].replace("-", "_")
                for line in (f"{word} {text}", f"{word}={text}", f"{underscored}={text}"):
                    assert value_at(parse(dialect, line), flag.target) == value

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_no_spelling_twice(self, dialect: Dialect) -> None:
        words = [word for flag in FLAGS for word in flag.spellings(dialect)]
        assert len(words) == len(set(words))

    def test_every_setting_has_a_flag(self) -> None:
        config = EngineConfig()
        settings = {"max_logprobs", "trace_capacity"}
        for section in ("model", "cache", "scheduler", "device", "structured_output", "speculation", "adapters"):
            settings |= {f"{section}.{name}" for name in vars(getattr(config, section))}
        settings.remove("speculation.options")  # made of --speculative-config
        settings |= {f"server.{name}" for name in vars(ServerOptions())}
        assert settings - {flag.target for flag in FLAGS} == set()

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_help_names_what_is_supported_and_hides_the_rest(self, dialect: Dialect) -> None:
        text = build_parser(dialect).format_help()
        for flag in FLAGS:
            for word in flag.spellings(dialect):
                if not flag.unsupported:
                    assert word in text
        assert "--tensor-parallel-size" not in text
        assert "Cache and memory:" in text


class TestJsonOfVllm:
    def test_speculation(self) -> None:
        wanted = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":6,"prompt_lookup_min":1}'
        speculation = parse("vllm", f"--speculative-config {wanted}")[0].speculation
        assert (speculation.method, speculation.num_draft_tokens) == ("ngram", 5)
        assert speculation.options == {"min_length": 1, "max_length": 6}
        line = "--speculative-algorithm NGRAM --speculative-ngram-max-match-window-size 6"
        assert parse("sglang", line)[0].speculation.options == {"max_length": 6}

    def test_a_draft_model(self) -> None:
        wanted = '{"method":"draft_model","model":"m","num_speculative_tokens":3,"max_model_len":9}'
        for dialect, line in (
            ("vllm", f"--speculative-config {wanted}"),
            ("vllm", '--spec-model m --spec-tokens 3 --speculative-config {"max_model_len":9}'),
        ):
            speculation = parse(dialect, line)[0].speculation
            assert (speculation.method, speculation.num_draft_tokens) == ("draft", 3)
            assert speculation.options == {"model": "m", "max_model_len": 9}
        line = "--speculative-algorithm STANDALONE --speculative-draft-model-path m --speculative-num-steps 3"
        line += " --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
        speculation = parse("sglang", line)[0].speculation
        assert (speculation.method, speculation.num_draft_tokens) == ("draft", 3)
        assert speculation.options == {"model": "m"}

    def test_a_head(self) -> None:
        for dialect, line in (
            ("vllm", '--speculative-config {"method":"eagle3","model":"m","num_speculative_tokens":3}'),
            ("sglang", "--speculative-algorithm EAGLE3 --speculative-draft-model-path m --speculative-num-steps 3"),
        ):
            speculation = parse(dialect, line)[0].speculation
            assert (speculation.method, speculation.num_draft_tokens) == ("eagle3", 3)
            assert speculation.options == {"model": "m"}
        assert refusal("vllm", '--speculative-config {"method":"eagle"}').startswith("speculative decoding by a head")

    def test_layers_of_the_model_itself(self) -> None:
        speculation = parse("vllm", '--speculative-config {"method":"self","num_layers":4}')[0].speculation
        assert (speculation.method, speculation.options) == ("self", {"num_layers": 4})

    def test_structured_outputs(self) -> None:
        config = parse("vllm", '--structured-outputs-config {"backend":"guidance","disable_any_whitespace":true}')[0]
        assert (config.structured_output.backend, config.structured_output.max_whitespace) == ("llguidance", 0)


@pytest.mark.parametrize("dialect", DIALECTS)
class TestAccess:
    def test_several_keys_of_several_flags(self, dialect: Dialect) -> None:
        model = "fox " if dialect == "vllm" else ""
        assert parse(dialect, f"{model}--api-key a b --api-key c")[1].api_keys == ("a", "b", "c")

    def test_keys_of_a_file(self, dialect: Dialect, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("first\n\n  second \n")
        assert parse(dialect, f"--api-key-file {file}")[1].api_keys == ("first", "second")
        assert parse(dialect, f"--api-key zeroth --api-key-file {file}")[1].api_keys == ("zeroth", "first", "second")
        file.write_text("\n")
        assert "has no key" in refusal(dialect, f"--api-key-file {file}")
        assert "cannot be read" in refusal(dialect, f"--api-key-file {tmp_path / 'none'}")

    def test_keys_of_the_environment(self, dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_API_KEY", "theirs")
        assert parse(dialect, "")[1].api_keys == ("theirs",)
        monkeypatch.setenv("KITFOX_API_KEY", "ours")
        monkeypatch.setenv("KITFOX_ADMIN_API_KEY", "admin")
        options = parse(dialect, "")[1]
        assert (options.api_keys, options.admin_api_key) == (("ours",), "admin")
        options = parse(dialect, "--api-key flag --admin-api-key flags-admin")[1]
        assert (options.api_keys, options.admin_api_key) == (("flag",), "flags-admin")

    def test_keys_are_never_empty_nor_shown(self, dialect: Dialect) -> None:
        assert "must not be empty" in refusal(dialect, "--api-key=")
        assert "must not be empty" in refusal(dialect, "--admin-api-key=")
        assert "secret" not in repr(parse(dialect, "--api-key secret --admin-api-key secret")[1])

    def test_origins_as_words_and_as_json(self, dialect: Dialect) -> None:
        for text in ("https://a https://b", '["https://a","https://b"]', '["https://a"] https://b'):
            options = parse(dialect, f"--allowed-origins {text} --allow-credentials")[1]
            assert (options.allowed_origins, options.allow_credentials) == (("https://a", "https://b"), True)
        assert "JSON list" in refusal(dialect, '--allowed-origins ["a"')
        assert "JSON list" in refusal(dialect, "--allowed-origins [1]")

    def test_tls_needs_both_files(self, dialect: Dialect) -> None:
        options = parse(dialect, f"--ssl-keyfile {__file__} --ssl-certfile {__file__}")[1]
        assert (options.ssl_keyfile, options.ssl_certfile) == (__file__, __file__)
        assert "both" in refusal(dialect, f"--ssl-keyfile {__file__}")
        assert "not a file" in refusal(dialect, f"--ssl-keyfile nothing --ssl-certfile {__file__}")


def test_a_model_behind_the_keys_is_not_taken_for_a_key() -> None:
    assert "write MODEL before --api-key" in refusal("vllm", "--api-key secret fox")
    assert parse("vllm", "--api-key a b --model fox")[1].api_keys == ("a", "b")
    assert parse("vllm", "--api-key secret")[1].api_keys == ("secret",)


class TestDialects:
    def test_the_two_example_lines_differ_in_the_cache_only(self) -> None:
        common = "--served-model-name fox-model --host 0.0.0.0 --port 8000"
        vllm = build_engine_config("vllm", f"MODEL {common} --max-model-len 4096".split())
        sglang = build_engine_config("sglang", f"--model-path MODEL {common} --context-length 4096".split())
        assert vllm[0].cache.organisation == "paged"
        assert sglang[0].cache.organisation == "radix"
        assert vllm[0] == sglang[0].replace(cache={"organisation": "paged"})
        assert vllm[1] == sglang[1] == ServerOptions(host="0.0.0.0", port=8000)
        assert vllm[0].model.model == "MODEL"
        assert vllm[0].model.served_model_names == ("fox-model",)
        assert vllm[0].model.max_model_len == 4096

    def test_defaults(self) -> None:
        assert parse("vllm", "") == (EngineConfig(), ServerOptions(host="127.0.0.1", port=8000))
        assert parse("sglang", "")[1] == ServerOptions(host="127.0.0.1", port=30000)

    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("cache", ["paged", "radix", "none"])
    def test_cache_decides_in_both(self, dialect: Dialect, cache: str) -> None:
        assert parse(dialect, f"--cache {cache}")[0].cache.organisation == cache

    def test_prefix_caching_off(self) -> None:
        assert parse("vllm", "--no-enable-prefix-caching")[0].cache.organisation == "none"
        assert parse("sglang", "--disable-radix-cache")[0].cache.organisation == "none"
        assert parse("vllm", "--enable-prefix-caching")[0].cache.organisation == "paged"
        assert "contradicts" in refusal("vllm", "--cache radix --no-enable-prefix-caching")
        assert "contradicts" in refusal("vllm", "--cache none --enable-prefix-caching")

    def test_chunked_prefill(self) -> None:
        assert parse("vllm", "--max-num-batched-tokens 512")[0] == EngineConfig().replace(
            scheduler={"max_num_batched_tokens": 512}
        )
        scheduler = parse("sglang", "--chunked-prefill-size -1")[0].scheduler
        assert (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens) == (False, 16384)
        scheduler = parse("sglang", "--chunked-prefill-size=-1 --max-prefill-tokens 8K")[0].scheduler
        assert (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens) == (False, 8192)
        assert "needs --chunked-prefill-size -1" in refusal("sglang", "--max-prefill-tokens 8192")

    def test_total_tokens_are_blocks(self) -> None:
        assert parse("sglang", "--max-total-tokens 1000 --page-size 16")[0].cache.num_blocks == 62
        assert "one block of 32" in refusal("sglang", "--max-total-tokens 31")
        assert "not both" in refusal("sglang", "--max-total-tokens 64 --num-blocks 2")

    def test_priority_order_is_never_turned_upside_down(self) -> None:
        both = "--enable-priority-scheduling --schedule-low-priority-values-first"
        assert parse("sglang", both)[0].scheduler.policy == "priority"
        assert "lower priority values first" in refusal("sglang", "--enable-priority-scheduling")
        assert "contradicts" in refusal("sglang", both + " --schedule-policy lpm")

    def test_model_by_position_or_by_name(self) -> None:
        assert parse("vllm", "--port 81 M")[0].model.model == "M"
        assert parse("vllm", "--enforce-eager M --port 81")[0].model.model == "M"
        assert parse("vllm", "M --model M")[0].model.model == "M"
        assert "given twice" in refusal("vllm", "M --model N")
        assert "before --served-model-name" in refusal("vllm", "--served-model-name fox M")
        with pytest.raises(ConfigError, match="--model-path is missing"):
            build_engine_config("sglang", [])

    def test_several_names(self) -> None:
        assert parse("vllm", "M --served-model-name a b --port 1")[0].model.served_model_names == ("a", "b")

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_a_gguf_files_own_quantisation_is_auto(self, dialect: Dialect) -> None:
        assert parse(dialect, "--quantization gguf") == parse(dialect, "--quantization auto") == parse(dialect, "")
        assert parse(dialect, "--quantization none")[0].model.quantization == "none"

    def test_threads_stay_or_move(self) -> None:
        assert parse("vllm", "")[0].device.pin_threads is None
        assert parse("vllm", "--pin-threads")[0].device.pin_threads is True
        assert parse("vllm", "--no-pin-threads")[0].device.pin_threads is False

    def test_a_captured_step_can_be_turned_off_in_either_dialect(self) -> None:
        assert not parse("vllm", "")[0].device.enforce_eager
        assert parse("vllm", "--enforce-eager")[0].device.enforce_eager
        assert parse("sglang", "--disable-cuda-graph")[0].device.enforce_eager

    @pytest.mark.parametrize("text", ["auto", "-1"])
    def test_longest_context_that_fits(self, text: str) -> None:
        assert parse("vllm", f"--max-model-len {text}")[0].model.max_model_len == -1

    def test_messages_are_translated(self) -> None:
        text = "This would fit: --max-model-len 4096"
        assert in_dialect("sglang", text) == "This would fit: --context-length 4096"
        assert in_dialect("vllm", text) == text
        assert in_dialect("sglang", "--dtype bfloat16, --unheard-of 1") == "--dtype bfloat16, --unheard-of 1"


class TestAdapters:
    @pytest.mark.parametrize(("dialect", "flag"), [("vllm", "--lora-modules"), ("sglang", "--lora-paths")])
    def test_names_and_directories(self, dialect: Dialect, flag: str) -> None:
        objects = '{"name":"c","path":"/c","base_model_name":"M"} {"lora_name":"d","lora_path":"/d","pinned":true}'
        adapters = parse(dialect, f"{flag} a=/a b=/b=2 {flag} {objects}")[0].adapters
        assert adapters.modules == (("a", "/a"), ("b", "/b=2"), ("c", "/c"), ("d", "/d"))
        assert adapters.enabled
        assert not parse(dialect, "")[0].adapters.enabled

    def test_a_directory_alone_is_a_name_too_in_sglang(self) -> None:
        assert parse("sglang", "--lora-paths some/sql")[0].adapters.modules == (("some/sql", "some/sql"),)
        assert "Is 'M' the MODEL?" in refusal("vllm", "--lora-modules a=/a M")

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("a=/a a=/b", "two adapters have the name 'a'"),
            ("M=/a --model M", "'M' is the model's own name"),
            ("fox=/a --served-model-name fox", "'fox' is the model's own name"),
            ("=/a", "must be NAME=PATH"),
            ("a=", "must be NAME=PATH"),
            ('{"name":"a"}', "must be NAME=PATH"),
            ('{"name":"a","path":3}', "must be NAME=PATH"),
            ('{"name":"a","path":"/a","rank":8}', "must be NAME=PATH"),
            ('{"name"', "must be a JSON object"),
            ("a=/a b=/b --max-cpu-loras 1", "must be at most 1 (--max-cpu-loras). Given: 2"),
        ],
    )
    def test_mistakes(self, line: str, words: str) -> None:
        assert words in refusal("vllm", f"--lora-modules {line}")

    def test_in_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "fox.yaml").write_text("lora-modules: [a=/a, {name: b, path: /b}]\nmax-loras: 2\n")
        config, _ = parse("vllm", f"--config {tmp_path / 'fox.yaml'}")
        assert config.adapters.modules == (("a", "/a"), ("b", "/b"))
        assert config.scheduler.max_running_adapters == 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("dialect", "line", "words"),
        [
            ("vllm", "--max-modl-len 4", "unknown flag --max-modl-len; the nearest is --max-model-len"),
            ("vllm", "--max_modl_len=4", "unknown flag --max-modl-len; the nearest is --max-model-len"),
            ("vllm", "--max-model 4", "unknown flag --max-model; the nearest is --max-model-len"),
            ("vllm", "--zzz", "unknown flag --zzz; see kitfox serve --help"),
            ("vllm", "--context-length 4", "is SGLang's spelling; here it is --max-model-len"),
            ("sglang", "--max-model-len 4", "is vLLM's spelling; here it is --context-length"),
            ("vllm", "--disable-radix-cache", "here it is --no-enable-prefix-caching"),
            ("vllm", "-tp 2", "--tensor-parallel-size is not supported: several devices are not supported yet"),
            ("sglang", "--speculative-algorithm DFLASH", f"must be one of {METHODS}. Given: 'dflash'"),
            ("sglang", "--speculative-algorithm STANDALONE", "a draft model needs its name"),
            ("vllm", '--speculative-config {"method":"self","num_layers":0}', "must be >= 1. Given: 0"),
            ("vllm", '--speculative-config {"method":"self","model":"m"}', "self has no setting model"),
            ("vllm", "--speculative-config.method ngram", "has no parts"),
            ("vllm", '--speculative-config {"method":"medusa"}', f"method must be one of {METHODS}"),
            ("vllm", '--speculative-config {"num_speculative_tokens":65}', "must be in [1, 64]. Given: 65"),
            ("vllm", '--speculative-config {"method":"ngram","draft":1}', "Given: draft"),
            (
                "vllm",
                '--speculative-config {"method":"ngram","suffix_decoding_max_tree_depth":9}',
                "ngram has no setting max_depth",
            ),
            ("vllm", '--structured-outputs-config {"backend":"outlines"}', "must be one of auto, llguidance, xgrammar"),
            ("vllm", '--structured-outputs-config {"disable_fallback":true}', "Given: disable_fallback: True"),
            ("sglang", "--grammar-backend none", "must be one of auto, llguidance, xgrammar"),
            ("vllm", "-O3", "only 0 is accepted"),
            ("vllm", "M extra", "unexpected argument 'extra'"),
            ("vllm", "--port 99999", "--port: must be in [1, 65535]. Given: '99999'"),
            ("vllm", "--port x", "--port: must be in [1, 65535]. Given: 'x'"),
            ("vllm", "--port", "--port: expected one argument"),
            ("vllm", "--dtype int8", "--dtype: must be one of auto, float32, bfloat16, float16. Given: 'int8'"),
            (
                "vllm",
                "--quantization awq",
                "must be one of auto, none, int8: other methods are not built yet. Given: 'awq'",
            ),
            ("vllm", "-q q4", "must be one of auto, none, int8"),
            ("sglang", "--quantization fp8", "other methods are not built yet. Given: 'fp8'"),
            ("vllm", "--device tpu", "--device: must be auto, cpu, cuda or cuda:N"),
            ("vllm", "--block-size 0", "--block-size: must be in [1, 1024]"),
            ("vllm", "--gpu-memory-utilization 0", "memory_fraction must be in (0, 1]. Given: 0.0"),
            ("vllm", "--max-num-seqs 0", "max_num_seqs must be >= 1. Given: 0"),
            ("vllm", "--max-model-len 0", "max_model_len must be >= 1, or -1 for auto. Given: 0"),
            ("vllm", "--max-num-queued-reqs 0", "max_num_queued_requests must be >= 1. Given: 0"),
            ("sglang", "--schedule-policy dfs-weight", "must be one of fcfs, priority, lpm"),
        ],
    )
    def test_words(self, dialect: Dialect, line: str, words: str) -> None:
        assert words in refusal(dialect, line)


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5K", 1536), ("2m", 2_000_000), ("1G", 1 << 30)]
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "-4", "4KB", "1.5", "0.0001k", "4 k"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


class TestConfigFile:
    def file(self, tmp_path: Path, text: str) -> str:
        (tmp_path / "fox.yaml").write_text(text)
        return f"--config {tmp_path / 'fox.yaml'}"

    def test_command_line_wins(self, tmp_path: Path) -> None:
        text = "model: M\nmax-model-len: 4k\nmax_num_seqs: 5\nserved-model-name: [a, b]\nenable-prefix-caching: false\n"
        config, options = parse("vllm", self.file(tmp_path, text + "port: 81\n") + " --port 82")
        assert config.model.model == "M"
        assert config.model.max_model_len == 4000
        assert config.model.served_model_names == ("a", "b")
        assert config.scheduler.max_num_seqs == 5
        assert config.cache.organisation == "none"
        assert options.port == 82

    def test_positional_model_wins(self, tmp_path: Path) -> None:
        line = self.file(tmp_path, "model: M\nserved-model-name: [a, b]")
        assert parse("vllm", line + " N")[0].model.model == "N"

    def test_dialect_of_the_file_is_that_of_the_command(self, tmp_path: Path) -> None:
        line = self.file(tmp_path, "model-path: M\ncontext-length: 100\ndisable-radix-cache: false\n")
        config, _ = build_engine_config("sglang", line.split())
        assert (config.model.model, config.model.max_model_len, config.cache.organisation) == ("M", 100, "radix")
        assert "here it is --max-model-len" in refusal("vllm", self.file(tmp_path, "context-length: 100\n"))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("prot: 81", "unknown flag --prot; the nearest is --port"),
            ("port: many", "--port: must be in"),
            ("enable-prefix-caching: maybe", "must be true or false"),
            ("tensor-parallel-size: 2", "several devices are not supported yet"),
            ("- a list", "must be a mapping"),
            ("a: [", "cannot be read"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, text: str, words: str) -> None:
        assert words in refusal("vllm", self.file(tmp_path, text))

    def test_absent(self, tmp_path: Path) -> None:
        assert "cannot be read" in refusal("vllm", f"--config={tmp_path / 'absent.yaml'}")
