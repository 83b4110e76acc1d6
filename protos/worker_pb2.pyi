from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FENCE_UNSPECIFIED: _ClassVar[Fence]
    FENCE_DRAFT_PROPOSED: _ClassVar[Fence]
    FENCE_VERIFY_PUBLISH: _ClassVar[Fence]
    FENCE_VERIFY_STASH: _ClassVar[Fence]
    FENCE_DRAFT_PREFILLED: _ClassVar[Fence]
    FENCE_VERIFY_COPIED: _ClassVar[Fence]
    FENCE_GRAMMAR_READY: _ClassVar[Fence]

class WaitPlace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_PLACE_UNSPECIFIED: _ClassVar[WaitPlace]
    WAIT_PLACE_START: _ClassVar[WaitPlace]
    WAIT_PLACE_PREFILL_HIDDEN: _ClassVar[WaitPlace]
    WAIT_PLACE_SAMPLING: _ClassVar[WaitPlace]
FENCE_UNSPECIFIED: Fence
FENCE_DRAFT_PROPOSED: Fence
FENCE_VERIFY_PUBLISH: Fence
FENCE_VERIFY_STASH: Fence
FENCE_DRAFT_PREFILLED: Fence
FENCE_VERIFY_COPIED: Fence
FENCE_GRAMMAR_READY: Fence
WAIT_PLACE_UNSPECIFIED: WaitPlace
WAIT_PLACE_START: WaitPlace
WAIT_PLACE_PREFILL_HIDDEN: WaitPlace
WAIT_PLACE_SAMPLING: WaitPlace

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("role", "protocol_version", "device", "vocab_size", "tokenizer_sha256", "dtype", "max_context_tokens", "kv_bytes_per_token", "hidden_width", "algorithm", "eos_token_ids", "model", "tokenizer_path", "pid", "metrics_port", "last_epoch", "hidden_layers", "memory", "under_mps", "pid_namespace", "shm_device", "has_scheduler", "has_paged_kv", "tokens_ahead", "shared_weight_bytes", "weights", "takes_mixed_steps", "takes_ragged_steps", "takes_masks", "max_draft_tokens", "takes_even_steps")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PATH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    UNDER_MPS_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHM_DEVICE_FIELD_NUMBER: _ClassVar[int]
    HAS_SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    HAS_PAGED_KV_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    SHARED_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MIXED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TAKES_RAGGED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MASKS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKES_EVEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    role: str
    protocol_version: int
    device: str
    vocab_size: int
    tokenizer_sha256: str
    dtype: str
    max_context_tokens: int
    kv_bytes_per_token: int
    hidden_width: int
    algorithm: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    tokenizer_path: str
    pid: int
    metrics_port: int
    last_epoch: int
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    memory: DeviceMemory
    under_mps: bool
    pid_namespace: str
    shm_device: int
    has_scheduler: bool
    has_paged_kv: bool
    tokens_ahead: int
    shared_weight_bytes: int
    weights: Manifest
    takes_mixed_steps: bool
    takes_ragged_steps: bool
    takes_masks: bool
    max_draft_tokens: int
    takes_even_steps: bool
    def __init__(self, role: _Optional[str] = ..., protocol_version: _Optional[int] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_sha256: _Optional[str] = ..., dtype: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., hidden_width: _Optional[int] = ..., algorithm: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ..., tokenizer_path: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_port: _Optional[int] = ..., last_epoch: _Optional[int] = ..., hidden_layers: _Optional[_Iterable[int]] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., under_mps: _Optional[bool] = ..., pid_namespace: _Optional[str] = ..., shm_device: _Optional[int] = ..., has_scheduler: _Optional[bool] = ..., has_paged_kv: _Optional[bool] = ..., tokens_ahead: _Optional[int] = ..., shared_weight_bytes: _Optional[int] = ..., weights: _Optional[_Union[Manifest, _Mapping]] = ..., takes_mixed_steps: _Optional[bool] = ..., takes_ragged_steps: _Optional[bool] = ..., takes_masks: _Optional[bool] = ..., max_draft_tokens: _Optional[int] = ..., takes_even_steps: _Optional[bool] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("total", "free", "weights", "work", "work_per_token", "work_per_choice")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    WORK_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WORK_PER_CHOICE_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    weights: int
    work: int
    work_per_token: int
    work_per_choice: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., weights: _Optional[int] = ..., work: _Optional[int] = ..., work_per_token: _Optional[int] = ..., work_per_choice: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("epoch", "peer", "manifest", "num_slots", "num_draft_tokens", "run_ahead", "page_tokens", "num_pages", "context_tokens", "chunk_tokens", "protocol_version", "debug", "given", "expected_draft", "slot_pages", "measures_step_tokens", "results", "chooses_draft_tokens", "pid", "longest_pause_ns")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DRAFT_FIELD_NUMBER: _ClassVar[int]
    SLOT_PAGES_FIELD_NUMBER: _ClassVar[int]
    MEASURES_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    CHOOSES_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PAUSE_NS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    peer: DescribeResponse
    manifest: Manifest
    num_slots: int
    num_draft_tokens: int
    run_ahead: int
    page_tokens: int
    num_pages: int
    context_tokens: int
    chunk_tokens: int
    protocol_version: int
    debug: bool
    given: Manifest
    expected_draft: DraftSizes
    slot_pages: int
    measures_step_tokens: bool
    results: Manifest
    chooses_draft_tokens: bool
    pid: int
    longest_pause_ns: int
    def __init__(self, epoch: _Optional[int] = ..., peer: _Optional[_Union[DescribeResponse, _Mapping]] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., num_slots: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., run_ahead: _Optional[int] = ..., page_tokens: _Optional[int] = ..., num_pages: _Optional[int] = ..., context_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., protocol_version: _Optional[int] = ..., debug: _Optional[bool] = ..., given: _Optional[_Union[Manifest, _Mapping]] = ..., expected_draft: _Optional[_Union[DraftSizes, _Mapping]] = ..., slot_pages: _Optional[int] = ..., measures_step_tokens: _Optional[bool] = ..., results: _Optional[_Union[Manifest, _Mapping]] = ..., chooses_draft_tokens: _Optional[bool] = ..., pid: _Optional[int] = ..., longest_pause_ns: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("step_tokens", "step_doubling_context", "command_socket", "costs")
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_DOUBLING_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_SOCKET_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    step_tokens: int
    step_doubling_context: int
    command_socket: str
    costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    def __init__(self, step_tokens: _Optional[int] = ..., step_doubling_context: _Optional[int] = ..., command_socket: _Optional[str] = ..., costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("rows", "draft_tokens", "ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    draft_tokens: int
    ns: int
    def __init__(self, rows: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., ns: _Optional[int] = ...) -> None: ...

class DraftSizes(_message.Message):
    __slots__ = ("num_draft_tokens", "hidden_width", "hidden_layers")
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    num_draft_tokens: int
    hidden_width: int
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_draft_tokens: _Optional[int] = ..., hidden_width: _Optional[int] = ..., hidden_layers: _Optional[_Iterable[int]] = ...) -> None: ...

class AttachDraftRequest(_message.Message):
    __slots__ = ("epoch", "attachment", "own", "given", "draft")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment: int
    own: Manifest
    given: Manifest
    draft: DraftSizes
    def __init__(self, epoch: _Optional[int] = ..., attachment: _Optional[int] = ..., own: _Optional[_Union[Manifest, _Mapping]] = ..., given: _Optional[_Union[Manifest, _Mapping]] = ..., draft: _Optional[_Union[DraftSizes, _Mapping]] = ...) -> None: ...

class AttachDraftResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachGrammarRequest(_message.Message):
    __slots__ = ("epoch", "attachment", "own", "given")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment: int
    own: Manifest
    given: Manifest
    def __init__(self, epoch: _Optional[int] = ..., attachment: _Optional[int] = ..., own: _Optional[_Union[Manifest, _Mapping]] = ..., given: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class AttachGrammarResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("grammar",)
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    def __init__(self, grammar: _Optional[str] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseDraftRequest(_message.Message):
    __slots__ = ("epoch", "attachment")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment: int
    def __init__(self, epoch: _Optional[int] = ..., attachment: _Optional[int] = ...) -> None: ...

class ReleaseDraftResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachDraftRequest(_message.Message):
    __slots__ = ("epoch", "attachment")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attachment: int
    def __init__(self, epoch: _Optional[int] = ..., attachment: _Optional[int] = ...) -> None: ...

class DetachDraftResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("kind", "path", "handle", "size", "buffers", "fences")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    path: str
    handle: bytes
    size: int
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    fences: _containers.RepeatedCompositeFieldContainer[FenceWord]
    def __init__(self, kind: _Optional[str] = ..., path: _Optional[str] = ..., handle: _Optional[bytes] = ..., size: _Optional[int] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., fences: _Optional[_Iterable[_Union[FenceWord, _Mapping]]] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "offset", "shape", "dtype", "writer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    writer: str
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., writer: _Optional[str] = ...) -> None: ...

class FenceWord(_message.Message):
    __slots__ = ("fence", "kind", "offset", "events")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    kind: str
    offset: int
    events: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fence: _Optional[_Union[Fence, str]] = ..., kind: _Optional[str] = ..., offset: _Optional[int] = ..., events: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FencePoint(_message.Message):
    __slots__ = ("fence", "value")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    value: int
    def __init__(self, fence: _Optional[_Union[Fence, str]] = ..., value: _Optional[int] = ...) -> None: ...

class FenceWait(_message.Message):
    __slots__ = ("fence", "value", "place")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    value: int
    place: WaitPlace
    def __init__(self, fence: _Optional[_Union[Fence, str]] = ..., value: _Optional[int] = ..., place: _Optional[_Union[WaitPlace, str]] = ...) -> None: ...

class StepCommand(_message.Message):
    __slots__ = ("epoch", "step", "slots", "waits", "signals", "chunks", "updates", "acknowledge", "top_logprobs", "attachment", "num_draft_tokens", "catches_up", "grammar", "constrained", "grammar_rows", "consumed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CATCHES_UP_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ROWS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    waits: _containers.RepeatedCompositeFieldContainer[FenceWait]
    signals: _containers.RepeatedCompositeFieldContainer[FencePoint]
    chunks: _containers.RepeatedCompositeFieldContainer[PromptChunk]
    updates: _containers.RepeatedCompositeFieldContainer[SlotUpdate]
    acknowledge: bool
    top_logprobs: int
    attachment: int
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    catches_up: bool
    grammar: int
    constrained: _containers.RepeatedScalarFieldContainer[int]
    grammar_rows: _containers.RepeatedCompositeFieldContainer[GrammarRow]
    consumed: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., waits: _Optional[_Iterable[_Union[FenceWait, _Mapping]]] = ..., signals: _Optional[_Iterable[_Union[FencePoint, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[PromptChunk, _Mapping]]] = ..., updates: _Optional[_Iterable[_Union[SlotUpdate, _Mapping]]] = ..., acknowledge: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., attachment: _Optional[int] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ..., catches_up: _Optional[bool] = ..., grammar: _Optional[int] = ..., constrained: _Optional[_Iterable[int]] = ..., grammar_rows: _Optional[_Iterable[_Union[GrammarRow, _Mapping]]] = ..., consumed: _Optional[int] = ...) -> None: ...

class GrammarRow(_message.Message):
    __slots__ = ("slot", "digest", "num_known", "tokens", "num_draft_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    digest: bytes
    num_known: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    def __init__(self, slot: _Optional[int] = ..., digest: _Optional[bytes] = ..., num_known: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class PromptChunk(_message.Message):
    __slots__ = ("slot", "start", "tokens", "is_last")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    def __init__(self, slot: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., is_last: _Optional[bool] = ...) -> None: ...

class SlotUpdate(_message.Message):
    __slots__ = ("slot", "generation", "first_page_index", "pages", "limit_tokens", "sampling", "max_draft_tokens", "prompt_tokens", "history_from", "cached_tokens", "has_cache_salt")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FROM_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    first_page_index: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    limit_tokens: int
    sampling: SlotSampling
    max_draft_tokens: int
    prompt_tokens: int
    history_from: int
    cached_tokens: int
    has_cache_salt: bool
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., first_page_index: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., limit_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SlotSampling, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., history_from: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., has_cache_salt: _Optional[bool] = ...) -> None: ...

class SlotSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "masked_before", "masked_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MASKED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    MASKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    masked_before: int
    masked_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., masked_before: _Optional[int] = ..., masked_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StepAck(_message.Message):
    __slots__ = ("epoch", "step", "enqueued_ns")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    enqueued_ns: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., enqueued_ns: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
