"""Composition root: configuration -> executor, KV cache, scheduler, core. Here alone the engine knows torch."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from kitfox.config import EngineConfig, ModelConfig
from kitfox.engine.client import (
    AbortRequests,
    AddRequests,
    ControlAnswer,
    ControlEngine,
    EngineFailed,
    EngineReady,
    EngineReply,
    StepDone,
    StopEngine,
    UseVocabulary,
    encoder,
    exit_with_parent,
    message_decoder,
)
from kitfox.engine.core import EngineCore
from kitfox.engine.scheduler import Scheduler
from kitfox.errors import ConfigError, WeightsError
from kitfox.garbage import keep_what_is_loaded
from kitfox.kv_cache.manager import make_kv_cache_manager
from kitfox.spec_decode.proposer import Proposer
from kitfox.spec_decode.speculator import Speculator
from kitfox.structured_output.manager import GrammarManager
from kitfox.structured_output.vocabulary import Vocabulary
from kitfox.tracing import TraceEvent, Tracer

if TYPE_CHECKING:
    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.executor.executor import Executor

logger = logging.getLogger("kitfox.engine")

GRAMMAR_POLL_MS = 1  # how often an idle engine looks whether a grammar is compiled


def make_core(
    config: EngineConfig, executor: Executor, num_blocks: int, tracer: Tracer, proposer: Proposer | None = None
) -> EngineCore:
    """proposer: of guesses, where the configuration's needs a model that is loaded already."""
    kv_cache = make_kv_cache_manager(config.cache, num_blocks)
    scheduler = Scheduler(config.scheduler, kv_cache, tracer, shares_prefixes=config.cache.organisation != "none")
    if config.speculation.method != "none":
        proposer = proposer or _proposer_on_model(config, executor, scheduler)
        scheduler.speculator = Speculator(config.speculation, proposer)
    return EngineCore(scheduler, executor, tracer)


def _proposer_on_model(config: EngineConfig, executor: Executor, scheduler: Scheduler) -> Proposer | None:
    """Whoever guesses with the model itself, or with a part that sits on it."""
    if config.speculation.method not in ("self", "eagle", "eagle3"):
        return None
    from kitfox.executor.draft_model import make_head_proposer, make_self_proposer

    def computed(request_id: str) -> tuple[int, list[int]]:
        return scheduler.requests[request_id].num_computed_tokens, scheduler.kv_cache.block_ids(request_id)

    make_proposer = make_self_proposer if config.speculation.method == "self" else make_head_proposer
    return make_proposer(config, executor, computed)


def use_vocabulary(core: EngineCore, config: EngineConfig, vocabulary: Vocabulary) -> None:
    """Tell a core what its tokens mean: without that it serves no request with a constraint."""
    core.scheduler.grammars = GrammarManager(config.structured_output, vocabulary, config.scheduler.max_num_seqs)


def load_core(
    config: EngineConfig,
    model_config: ModelConfig,
    path: Path,
    num_blocks: int,
    on_phase: Callable[[str, float], None],
) -> EngineCore:
    """Load the model and make everything around it; `on_phase` hears of each phase and its seconds."""
    started = time.monotonic()
    from kitfox.executor.executor import Executor  # importing torch is a phase of its own

    on_phase("import torch", time.monotonic() - started)
    executor = Executor(config, model_config, path, num_blocks, on_phase)
    proposer: Proposer | None = None
    if config.speculation.method == "draft":
        from kitfox.executor.draft_model import make_draft_proposer

        started = time.monotonic()
        proposer = make_draft_proposer(config, executor, path, num_blocks)
        on_phase("load draft model", time.monotonic() - started)
    return make_core(config, executor, num_blocks, Tracer(config.trace_capacity), proposer)


def run_engine(config: EngineConfig, num_blocks: int, requests_address: str, replies_address: str) -> None:
    """The engine process: load, say so, and turn the crank until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front end's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_with_parent()
    context = zmq.Context()
    replies = context.socket(zmq.PUSH)
    replies.set_hwm(0)
    replies.connect(replies_address)

    def reply(message: EngineReply) -> None:
        replies.send(encoder.encode(message))

    try:
        requests = context.socket(zmq.PULL)
        requests.set_hwm(0)
        requests.connect(requests_address)
        core = _load_for_process(config, num_blocks, reply)
        _serve_requests(core, config, requests, reply)
    except Exception as error:
        reply(EngineFailed(cause=f"{type(error).__name__}: {error}", detail=traceback.format_exc()))
        context.destroy(linger=2000)
        sys.exit(1)
    context.destroy(linger=2000)


def _load_for_process(config: EngineConfig, num_blocks: int, reply: Callable[[EngineReply], None]) -> EngineCore:
    from kitfox.weights.hub import resolve_model
    from kitfox.weights.model_config import read_model_config

    gc.disable()  # nothing that is loaded is garbage, and looking takes a sixth of a second
    phases: list[tuple[str, float]] = []
    path = resolve_model(config.model.model, revision=config.model.revision).path
    core = load_core(
        config, read_model_config(path), path, num_blocks, lambda name, seconds: phases.append((name, seconds))
    )
    gc.enable()
    keep_what_is_loaded()
    reply(
        EngineReady(
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            phases=phases,
            kernels=core.executor.description,
            device=core.executor.device_name,
            num_threads=core.executor.num_threads,
        )
    )
    return core


def _serve_requests(
    core: EngineCore, config: EngineConfig, requests: zmq.Socket[bytes], reply: Callable[[EngineReply], None]
) -> None:
    while True:
        # Idle, wait for a message; busy, only take what is there: an abort is honoured before the next step.
        timeout_ms: int | None = 0
        if not core.has_work and not core.has_news_for_executor:
            timeout_ms = GRAMMAR_POLL_MS if core.waits_for_grammars else None
        while requests.poll(timeout_ms):
            message = message_decoder.decode(requests.recv())
            timeout_ms = 0
            match message:
                case AddRequests():
                    for request in message.requests:
                        core.add_request(request)
                case AbortRequests():
                    core.abort(message.request_ids)
                case UseVocabulary():
                    use_vocabulary(core, config, message.vocabulary)
                case ControlEngine():
                    reply(obey(core, message))
                case StopEngine():
                    core.shutdown()
                    return
        if core.has_work or core.has_news_for_executor:
            reply(StepDone(core.step()))


def obey(core: EngineCore, message: ControlEngine) -> ControlAnswer:
    """Do what a command says, between two steps."""
    done, problem = True, ""
    events: list[TraceEvent] = []
    match message.command:
        case "trace":
            events = core.tracer.of_request(message.request_id)
        case "flush_cache":
            done = core.flush_cache()
        case "pause":
            core.pause()
        case "resume":
            core.resume()
        case "sleep":
            done = core.sleep()
        case "wake_up":
            core.wake_up()
        case "start_profile":
            core.tracer.start_profile()
        case "stop_profile":
            events = core.tracer.stop_profile()
        case "load_adapter":
            try:
                core.executor.load_adapter(message.adapter_id, Path(message.path))
            except WeightsError as error:
                done, problem = False, str(error)
            except Exception:  # an adapter is no reason to end everybody's requests
                logger.exception("the adapter in %s could not be loaded", message.path)
                core.executor.remove_adapter(message.adapter_id)
                done, problem = False, "the server failed to load it; its log says why"
        case "unload_adapter":
            core.unload_adapter(message.adapter_id)
        case "set_scheduling":
            assert message.scheduling is not None
            core.scheduler.config = message.scheduling
        case "slow_down":
            core.step_sleep_s = message.step_sleep_s
        case "freeze_gc":
            keep_what_is_loaded()
    return ControlAnswer(message.number, done, core.scheduler.stats(), events, problem)


def async_llm(config: EngineConfig) -> AsyncLLM:
    """An AsyncLLM whose engine process is being started.

    Raises:
        ConfigError: it cannot fit this machine. ModelNotFoundError, UnsupportedModelError: as they say.
    """
    from kitfox.engine.async_llm import AsyncLLM
    from kitfox.engine.client import ProcessClient
    from kitfox.plan import make_plan, settle
    from kitfox.spec_decode.proposers import guesser_of
    from kitfox.weights.adapters import read_adapter_config
    from kitfox.weights.hub import resolve_model
    from kitfox.weights.model_config import read_generation_defaults, read_model_config

    path = resolve_model(config.model.model, revision=config.model.revision).path
    model_config = read_model_config(path)
    plan = make_plan(config, model_config, guesser=guesser_of(config))
    config = settle(config, plan)
    for name, directory in config.adapters.modules:
        try:
            read_adapter_config(Path(directory))
        except WeightsError as error:
            raise ConfigError(f"--lora-modules {name}: {error}", param="lora_modules") from None
    return AsyncLLM(
        config,
        model_config,
        path,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        start_engine=lambda: ProcessClient(config, plan.num_blocks, run_engine),
        default_sampling_params=read_generation_defaults(path, config.model),
    )
