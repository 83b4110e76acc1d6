from slipstream.protos import generation_pb2 as _generation_pb2
from slipstream.protos import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournaledJob(_message.Message):
    __slots__ = ("first", "num_samples", "stop", "min_new_tokens", "digest", "attempt", "created_ns", "is_detached", "is_cancelled", "model_identity", "owner", "continues_prompt", "shows_special")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    IS_DETACHED_FIELD_NUMBER: _ClassVar[int]
    IS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SHOWS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    first: _scheduler_pb2.NewSequence
    num_samples: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    min_new_tokens: int
    digest: bytes
    attempt: int
    created_ns: int
    is_detached: bool
    is_cancelled: bool
    model_identity: str
    owner: str
    continues_prompt: bool
    shows_special: bool
    def __init__(self, first: _Optional[_Union[_scheduler_pb2.NewSequence, _Mapping]] = ..., num_samples: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., min_new_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., attempt: _Optional[int] = ..., created_ns: _Optional[int] = ..., is_detached: _Optional[bool] = ..., is_cancelled: _Optional[bool] = ..., model_identity: _Optional[str] = ..., owner: _Optional[str] = ..., continues_prompt: _Optional[bool] = ..., shows_special: _Optional[bool] = ...) -> None: ...

class JournaledOutput(_message.Message):
    __slots__ = ("samples", "failure", "left_as")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LEFT_AS_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[JournaledSample]
    failure: _scheduler_pb2.Refusal
    left_as: str
    def __init__(self, samples: _Optional[_Iterable[_Union[JournaledSample, _Mapping]]] = ..., failure: _Optional[_Union[_scheduler_pb2.Refusal, _Mapping]] = ..., left_as: _Optional[str] = ...) -> None: ...

class JournaledSample(_message.Message):
    __slots__ = ("token_ids", "is_draft", "logprobs", "top_token_ids", "top_logprobs", "finish_reason", "usage", "error", "ends_with_token", "is_cut", "total_draft_tokens", "drafts_by_accepted", "admitted_ns", "first_token_ns", "last_token_ns", "cached_tokens", "tokens_beyond_draft", "num_continued")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ENDS_WITH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_BY_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BEYOND_DRAFT_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTINUED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_draft: bytes
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    error: _scheduler_pb2.Refusal
    ends_with_token: bool
    is_cut: bool
    total_draft_tokens: int
    drafts_by_accepted: _containers.RepeatedScalarFieldContainer[int]
    admitted_ns: int
    first_token_ns: int
    last_token_ns: int
    cached_tokens: int
    tokens_beyond_draft: int
    num_continued: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., is_draft: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[_scheduler_pb2.Refusal, _Mapping]] = ..., ends_with_token: _Optional[bool] = ..., is_cut: _Optional[bool] = ..., total_draft_tokens: _Optional[int] = ..., drafts_by_accepted: _Optional[_Iterable[int]] = ..., admitted_ns: _Optional[int] = ..., first_token_ns: _Optional[int] = ..., last_token_ns: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., tokens_beyond_draft: _Optional[int] = ..., num_continued: _Optional[int] = ...) -> None: ...
