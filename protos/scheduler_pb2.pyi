from slipstream.protos import generation_pb2 as _generation_pb2
from slipstream.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchPagesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PageChanges(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[PageChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[PageChange, _Mapping]]] = ...) -> None: ...

class PageChange(_message.Message):
    __slots__ = ("key", "parent", "token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: int
    parent: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[int] = ..., parent: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeSchedulerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SchedulerDescription(_message.Message):
    __slots__ = ("server", "tokenizer_path", "eos_token_ids", "max_sequences", "most_draft_tokens", "constraints")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_PATH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MOST_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    server: _generation_pb2.GetServerInfoResponse
    tokenizer_path: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_sequences: int
    most_draft_tokens: int
    constraints: bool
    def __init__(self, server: _Optional[_Union[_generation_pb2.GetServerInfoResponse, _Mapping]] = ..., tokenizer_path: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_sequences: _Optional[int] = ..., most_draft_tokens: _Optional[int] = ..., constraints: _Optional[bool] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("sequences", "cancelled")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    cancelled: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., cancelled: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("id", "epoch", "job_id", "prompt", "output", "max_new_tokens", "sampling", "stop_token_ids", "top_logprobs", "max_draft_tokens", "priority", "arrived_ns", "deadline_ns", "cache_salt", "arrival", "grammar")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_NS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    id: int
    epoch: int
    job_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    output: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    sampling: _worker_pb2.SlotSampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    max_draft_tokens: int
    priority: int
    arrived_ns: int
    deadline_ns: int
    cache_salt: str
    arrival: int
    grammar: str
    def __init__(self, id: _Optional[int] = ..., epoch: _Optional[int] = ..., job_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., output: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_worker_pb2.SlotSampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., arrived_ns: _Optional[int] = ..., deadline_ns: _Optional[int] = ..., cache_salt: _Optional[str] = ..., arrival: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("state", "output", "refusals")
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    state: SchedulerState
    output: StepOutput
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, state: _Optional[_Union[SchedulerState, _Mapping]] = ..., output: _Optional[_Union[StepOutput, _Mapping]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class SchedulerState(_message.Message):
    __slots__ = ("serving", "paused", "is_final")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    serving: SchedulerDescription
    paused: str
    is_final: bool
    def __init__(self, serving: _Optional[_Union[SchedulerDescription, _Mapping]] = ..., paused: _Optional[str] = ..., is_final: _Optional[bool] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("sequences", "num_tokens", "num_accepted", "finish_reasons", "tokens", "num_draft_tokens", "published_ns", "admitted", "admitted_ns", "logprobs", "cached_tokens", "is_beyond_draft")
    class CachedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_NS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_BEYOND_DRAFT_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_generation_pb2.FinishReason]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    published_ns: int
    admitted: _containers.RepeatedScalarFieldContainer[int]
    admitted_ns: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    cached_tokens: _containers.ScalarMap[int, int]
    is_beyond_draft: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[_generation_pb2.FinishReason, str]]] = ..., tokens: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., published_ns: _Optional[int] = ..., admitted: _Optional[_Iterable[int]] = ..., admitted_ns: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[_Mapping[int, int]] = ..., is_beyond_draft: _Optional[_Iterable[bool]] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("sequence", "tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tokens: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    def __init__(self, sequence: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("sequence", "code", "message", "retry_after_ms")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    code: int
    message: str
    retry_after_ms: int
    def __init__(self, sequence: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SwapDraftRequest(_message.Message):
    __slots__ = ("address", "num_draft_tokens", "judge_steps", "rollback_below")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JUDGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_BELOW_FIELD_NUMBER: _ClassVar[int]
    address: str
    num_draft_tokens: int
    judge_steps: int
    rollback_below: float
    def __init__(self, address: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., judge_steps: _Optional[int] = ..., rollback_below: _Optional[float] = ...) -> None: ...

class SwapDraftResponse(_message.Message):
    __slots__ = ("before", "after", "rolled_back", "reason", "longest_pause_ms")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    before: DraftFigures
    after: DraftFigures
    rolled_back: bool
    reason: str
    longest_pause_ms: float
    def __init__(self, before: _Optional[_Union[DraftFigures, _Mapping]] = ..., after: _Optional[_Union[DraftFigures, _Mapping]] = ..., rolled_back: _Optional[bool] = ..., reason: _Optional[str] = ..., longest_pause_ms: _Optional[float] = ...) -> None: ...

class DraftFigures(_message.Message):
    __slots__ = ("algorithm", "num_draft_tokens", "num_steps", "accept_length", "tokens_per_second", "step_ms")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    num_draft_tokens: int
    num_steps: int
    accept_length: float
    tokens_per_second: float
    step_ms: float
    def __init__(self, algorithm: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., accept_length: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., step_ms: _Optional[float] = ...) -> None: ...
