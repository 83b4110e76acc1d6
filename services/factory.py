"""Makes a worker's role engine from its settings: loads the model and describes it."""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from slipstream.common.device.choose import choose_device
from slipstream.common.device.cpu.device import worker_threads
from slipstream.common.errors import ConfigError, OutOfMemoryError, SlipstreamError
from slipstream.common.host import pid_namespace, shm_device
from slipstream.common.wire.layout import BufferName
from slipstream.common.wire.manifest import DTYPE_NAMES, DTYPES, EVENT, BufferSpec
from slipstream.common.wire.step import Role
from slipstream.common.wire.worker import DeviceMemory, WorkerDescription
from slipstream.services.draft.drafters import BlockDrafter, HeadDrafter, StandaloneDrafter
from slipstream.services.draft.engine import DraftEngine
from slipstream.services.draft.ngram import NgramDrafter
from slipstream.services.draft.suffix_cache import SuffixCache
from slipstream.services.models.checkpoint import LoadFormat, load_decoder, load_head
from slipstream.services.models.config import ModelConfig, Rank
from slipstream.services.models.decoder import Decoder, as_kept
from slipstream.services.models.head_config import HEADS
from slipstream.services.models.heads import DFlashHead, make_head
from slipstream.services.models.json_files import tokenizer_fingerprint
from slipstream.services.models.sharding import sharded
from slipstream.services.verify.engine import VerifyEngine, fused_layers
from slipstream.services.worker.config import FP8_KV, NGRAM
from slipstream.services.worker.crew import join_ranks
from slipstream.services.worker.follower import Follower, Line
from slipstream.services.worker.language_model import LanguageModel
from slipstream.services.worker.memory import WORK_BYTES, loading, needed_for_work, with_hidden_states

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from slipstream.common.device.interface import Device
    from slipstream.common.wire.manifest import Manifest
    from slipstream.services.draft.engine import Drafter
    from slipstream.services.models.heads import DraftHead
    from slipstream.services.models.ranks import Ranks
    from slipstream.services.worker.config import WorkerConfig
    from slipstream.services.worker.crew import Crew
    from slipstream.services.worker.engine import RoleEngine

logger = logging.getLogger(__name__)

_FP8_CAPABILITY = (8, 9)
"""Compute capability from which a GPU has instructions that convert FP8 numbers."""


def make_verify(config: WorkerConfig, device: Device, metrics_port: int, *, crew: Crew | None = None) -> RoleEngine:
    """Loads the target model, with `crew` a part of it. Raises CheckpointError, OutOfMemoryError, ConfigError."""
    if config.simulate_accept_length is not None:
        logger.warning(
            "draft tokens are accepted by chance, %g tokens a step: the output is not the model's",
            config.simulate_accept_length,
        )
    description = describe_verify(config, device, metrics_port)
    model = _load(config, device, None if crew is None else crew.meet(device.torch_device))
    if crew is not None:
        crew.wait_until_loaded()
    if config.share_weights:
        description = replace(description, weights=_lend(model.decoder, device))
    return VerifyEngine(
        model,
        description,
        simulate_accept_length=config.simulate_accept_length,
        simulate_accept_by_position=config.simulate_accept_by_position or (),
        deterministic_width=config.deterministic_width,
    )


def make_draft(config: WorkerConfig, device: Device, metrics_port: int) -> RoleEngine:
    """Loads the draft model, if the algorithm has one. Raises CheckpointError, OutOfMemoryError."""
    description = describe_draft(config, device, metrics_port)
    drafter: Drafter
    if config.algorithm in HEADS:
        head = _load_head(config, device)
        where, dtype, keeps_fp8 = device.torch_device, dtype_of(config, device), keeps_fp8_kv(config, device)
        drafter = (
            BlockDrafter(head, where, dtype, keeps_fp8=keeps_fp8)
            if isinstance(head, DFlashHead)
            else HeadDrafter(head, where, dtype, keeps_fp8=keeps_fp8)
        )
        description = replace(description, shared_weight_bytes=head.num_borrowed_bytes)
    elif config.algorithm == NGRAM:
        tokens = config.suffix_cache_tokens
        drafter = NgramDrafter(*config.prompt_lookup, device.torch_device, suffix_cache_tokens=tokens)
    else:
        drafter = StandaloneDrafter(_load(config, device))
    return DraftEngine(drafter, description)


def _lend(decoder: Decoder, device: Device) -> Manifest:
    """Moves embedding and output into shared memory, which drafts may map. Raises OutOfMemoryError and others.

    On a CPU the output has a layout of its own, which stays beside the plain copy.
    """
    weights = {BufferName.EMBEDDING: decoder.embedding.data}
    if not decoder.config.tie_word_embeddings:
        weights[BufferName.OUTPUT] = decoder.head.plain_weight.data
    writer = Role.VERIFY.value
    specs = [BufferSpec(name, tuple(weight.shape), weight.dtype, writer) for name, weight in weights.items()]
    try:
        arena = device.create_arena(specs, ())
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{error}; share_weights puts embedding and output there") from error
    weakref.finalize(decoder, arena.close)  # at the end of the process, too: a file has its name until then
    decoder.embedding.data = arena.tensor(BufferName.EMBEDDING).copy_(weights[BufferName.EMBEDDING])
    if BufferName.OUTPUT in weights:
        output = arena.tensor(BufferName.OUTPUT).copy_(weights[BufferName.OUTPUT])
        if decoder.head.weight is not None:
            decoder.head.weight.data = output
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()  # a draft reads them from another stream
    return arena.manifest


def dtype_of(config: WorkerConfig, device: Device) -> torch.dtype:
    """The dtype to compute in. Raises ConfigError for any but float32 on a CPU."""
    is_cpu = device.torch_device.type == "cpu"
    if config.dtype == "auto":
        return torch.float32 if is_cpu else torch.bfloat16
    if is_cpu and config.dtype != "float32":
        raise ConfigError("dtype", config.dtype, "auto or float32, on a CPU")
    return DTYPES[config.dtype]


def keeps_fp8_kv(config: WorkerConfig, device: Device) -> bool:
    """Returns whether keys and values are kept as FP8. Raises ConfigError for a GPU that cannot convert them."""
    keeps_fp8, where = config.kv_dtype == FP8_KV, device.torch_device
    if keeps_fp8 and where.type == "cuda" and torch.cuda.get_device_capability(where) < _FP8_CAPABILITY:
        raise ConfigError("kv_dtype", FP8_KV, "auto, on a GPU of compute capability below 8.9")
    return keeps_fp8


def follow(config: WorkerConfig, rank: int, store: int, connection: socket.socket) -> None:
    """Serves a rank after the first until rank 0 hangs up."""
    place = Rank(rank, config.tensor_parallel_size)
    device = choose_device(config.device, ordinal=rank)
    line = Line(connection, partial(_free_bytes, device.torch_device))
    try:
        torch.set_num_threads(config.threads or worker_threads())
        line.show_life()
        if not device.has_stream_threads:
            device.create_stream(f"rank {rank}", _raise).bind_thread()
        ranks = join_ranks(place, store, device.torch_device)
        model = _load(config, device, ranks)
    except SlipstreamError as error:
        line.answer(str(error), kind=type(error).__name__)
        line.wait_for_end()
        return
    line.answer("")
    follower = Follower(model.decoder, ranks, device.torch_device, keeps_fp8=keeps_fp8_kv(config, device))
    with torch.inference_mode():
        # On a GPU the thread waits for the driver, too, and neither this nor a collective is seen.
        line.serve(follower, None if device.torch_device.type == "cuda" else ranks)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _raise(error: BaseException) -> NoReturn:
    raise error


def _target_config(config: WorkerConfig, number: int = 0) -> ModelConfig:
    """The part of the target that one of its ranks has."""
    return sharded(ModelConfig.from_directory(config.directory), Rank(number, config.tensor_parallel_size))


def _load(config: WorkerConfig, device: Device, ranks: Ranks | None = None) -> LanguageModel:
    path, where, dtype = config.directory, device.torch_device, dtype_of(config, device)
    keeps_fp8 = keeps_fp8_kv(config, device)

    def make_empty(meta: torch.device) -> Decoder:
        return Decoder(as_kept(_target_config(config), where, dtype), device=meta, dtype=dtype)

    with loading(path.name, where, make_empty):
        decoder = load_decoder(
            path,
            device=where,
            dtype=dtype,
            load_format=LoadFormat(config.load_format),
            decoder_class=_models_on(where)[0],
            ranks=ranks,
        )
    return LanguageModel(decoder, where, dtype, keeps_fp8=keeps_fp8)


def _models_on(device: torch.device) -> tuple[type[Decoder], Callable[..., DraftHead]]:
    """Returns the class of decoders, and what makes draft heads: on a GPU both work by kernels."""
    if device.type != "cuda":
        return Decoder, make_head
    # Imported here, as there is no triton where there is no GPU.
    from slipstream.services.models.kernels.fused import FusedDecoder, make_fused_head

    return FusedDecoder, make_fused_head


def _load_head(config: WorkerConfig, device: Device) -> DraftHead:
    path, where, dtype, algorithm = config.directory, device.torch_device, dtype_of(config, device), config.algorithm
    load_format = LoadFormat(config.load_format)
    with loading(path.name, where, lambda meta: make_head(HEADS[algorithm].config(path), device=meta, dtype=dtype)):
        return load_head(
            algorithm,
            path,
            target=config.target,
            device=where,
            dtype=dtype,
            load_format=load_format,
            borrows=config.share_weights,
            make=_models_on(where)[1],
        )


def describe_verify(config: WorkerConfig, device: Device, metrics_port: int) -> WorkerDescription:
    """Describes the verify service, without loading its weights. Raises CheckpointError, ConfigError.

    Of several ranks each has such keys and values.
    """
    model = _target_config(config)
    return replace(
        _describe(Role.VERIFY, config, model, device, metrics_port),
        hidden_width=len(fused_layers(model.num_layers)) * model.hidden_size,
        eos_token_ids=tuple(sorted(model.eos_token_ids)),
        tokenizer_path=str(config.directory),
        takes_masks=device.fence_kind != EVENT,
    )


def describe_draft(config: WorkerConfig, device: Device, metrics_port: int) -> WorkerDescription:
    """Describes the draft service, without loading its weights. Raises CheckpointError."""
    if config.algorithm not in HEADS:
        model = ModelConfig.from_directory(config.directory)
        found = replace(_describe(Role.DRAFT, config, model, device, metrics_port), algorithm=config.algorithm)
        if config.algorithm != NGRAM:
            return found
        remembered = SuffixCache.num_bytes(config.suffix_cache_tokens, config.prompt_lookup[1])
        memory = DeviceMemory(work=WORK_BYTES + remembered)
        return replace(found, model=_ngrams(config), kv_bytes_per_token=torch.int32.itemsize, memory=memory)
    head = HEADS[config.algorithm].config(config.directory)
    found = _describe(Role.DRAFT, config, head.layer, device, metrics_port)
    memory = found.memory
    if head.max_draft_tokens:  # a block comes beside the step's tokens, in one forward
        memory = replace(memory, work_per_token=2 * memory.work_per_token)
    return replace(
        found,
        memory=with_hidden_states(memory, head.hidden_width, dtype_of(config, device)),
        hidden_width=head.hidden_width,
        hidden_layers=head.hidden_layers,
        tokens_ahead=head.tokens_ahead,
        max_draft_tokens=head.max_draft_tokens,
        algorithm=config.algorithm,
    )


def _describe(
    role: Role, config: WorkerConfig, model: ModelConfig, device: Device, metrics_port: int
) -> WorkerDescription:
    """`model`: the layers that keep keys and values."""
    directory = config.directory
    dtype = dtype_of(config, device)
    tokenizer = directory
    if config.target is not None and not (directory / "tokenizer.json").is_file():
        tokenizer = config.target
    return WorkerDescription(
        role=role,
        device=device.identity,
        under_mps=device.under_mps,
        vocab_size=model.vocab_size,
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
        dtype=DTYPE_NAMES[dtype],
        max_context_tokens=model.max_position_embeddings,
        kv_bytes_per_token=model.kv_bytes_per_token(dtype, is_fp8=keeps_fp8_kv(config, device)),
        has_paged_kv=True,
        takes_mixed_steps=role is Role.VERIFY and config.deterministic_width is None,
        takes_ragged_steps=device.has_stream_threads,
        takes_even_steps=config.deterministic_width is None,
        model=_name(config, model),
        memory=needed_for_work(model, dtype),
        pid=os.getpid(),
        metrics_port=metrics_port,
        pid_namespace=pid_namespace(),
        shm_device=shm_device(),
    )


def _name(config: WorkerConfig, model: ModelConfig) -> str:
    """The model's name, with a note if its output is no text, or if only its text part is loaded."""
    notes = [] if model.text_of is None else ["text part"]
    if config.tensor_parallel_size > 1:
        notes.append(f"{config.tensor_parallel_size} ranks")
    notes += [] if config.load_format != LoadFormat.DUMMY.value else ["random weights"]
    if config.simulate_accept_length is not None:
        notes.append(f"accept length simulated: {config.simulate_accept_length:g}")
    if config.simulate_accept_by_position is not None:
        notes.append(f"acceptance simulated: {config.simulate_accept_by_position}")
    return model_name(config.directory) + (f" ({', '.join(notes)})" if notes else "")


def model_name(directory: Path) -> str:
    """The directory's name; of a model in the hub's cache, ORG/NAME."""
    cached = directory.parent.parent.name
    if directory.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def _ngrams(config: WorkerConfig) -> str:
    shortest, longest = config.prompt_lookup
    lengths = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
    others = f", also in {config.suffix_cache_tokens} of recent outputs" if config.suffix_cache_tokens else ""
    return f"n-grams of {lengths} tokens{others}"
