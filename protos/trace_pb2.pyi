from slipstream.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceSite(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRACE_SITE_UNSPECIFIED: _ClassVar[TraceSite]
    TRACE_SITE_SEND: _ClassVar[TraceSite]
    TRACE_SITE_RESULT: _ClassVar[TraceSite]
    TRACE_SITE_WAIT: _ClassVar[TraceSite]
    TRACE_SITE_TAKE_IN: _ClassVar[TraceSite]
    TRACE_SITE_IDLE: _ClassVar[TraceSite]
    TRACE_SITE_RECEIVE: _ClassVar[TraceSite]
    TRACE_SITE_ENQUEUE: _ClassVar[TraceSite]
    TRACE_SITE_STREAM: _ClassVar[TraceSite]
    TRACE_SITE_TOKENISE: _ClassVar[TraceSite]
    TRACE_SITE_SUBMIT: _ClassVar[TraceSite]
    TRACE_SITE_FIRST_TOKEN: _ClassVar[TraceSite]
    TRACE_SITE_HOLD: _ClassVar[TraceSite]
    TRACE_SITE_PREFILL: _ClassVar[TraceSite]
    TRACE_SITE_DRAFT_BACKLOG: _ClassVar[TraceSite]
    TRACE_SITE_ACKNOWLEDGEMENT: _ClassVar[TraceSite]
    TRACE_SITE_ATTACH: _ClassVar[TraceSite]
    TRACE_SITE_STAGING: _ClassVar[TraceSite]
    TRACE_SITE_DRAIN: _ClassVar[TraceSite]
    TRACE_SITE_MASKS: _ClassVar[TraceSite]
    TRACE_SITE_COLLECTIVES: _ClassVar[TraceSite]
TRACE_SITE_UNSPECIFIED: TraceSite
TRACE_SITE_SEND: TraceSite
TRACE_SITE_RESULT: TraceSite
TRACE_SITE_WAIT: TraceSite
TRACE_SITE_TAKE_IN: TraceSite
TRACE_SITE_IDLE: TraceSite
TRACE_SITE_RECEIVE: TraceSite
TRACE_SITE_ENQUEUE: TraceSite
TRACE_SITE_STREAM: TraceSite
TRACE_SITE_TOKENISE: TraceSite
TRACE_SITE_SUBMIT: TraceSite
TRACE_SITE_FIRST_TOKEN: TraceSite
TRACE_SITE_HOLD: TraceSite
TRACE_SITE_PREFILL: TraceSite
TRACE_SITE_DRAFT_BACKLOG: TraceSite
TRACE_SITE_ACKNOWLEDGEMENT: TraceSite
TRACE_SITE_ATTACH: TraceSite
TRACE_SITE_STAGING: TraceSite
TRACE_SITE_DRAIN: TraceSite
TRACE_SITE_MASKS: TraceSite
TRACE_SITE_COLLECTIVES: TraceSite

class TraceRequest(_message.Message):
    __slots__ = ("steps", "wait_ms")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    wait_ms: int
    def __init__(self, steps: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class TraceResponse(_message.Message):
    __slots__ = ("epoch", "device", "fence", "under_mps", "algorithm", "run_ahead", "steps", "processes", "clock_samples")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    UNDER_MPS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    device: str
    fence: str
    under_mps: bool
    algorithm: str
    run_ahead: int
    steps: _containers.RepeatedCompositeFieldContainer[TracedStep]
    processes: _containers.RepeatedCompositeFieldContainer[TracedProcess]
    clock_samples: _containers.RepeatedCompositeFieldContainer[ClockSample]
    def __init__(self, epoch: _Optional[int] = ..., device: _Optional[str] = ..., fence: _Optional[str] = ..., under_mps: _Optional[bool] = ..., algorithm: _Optional[str] = ..., run_ahead: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TracedStep, _Mapping]]] = ..., processes: _Optional[_Iterable[_Union[TracedProcess, _Mapping]]] = ..., clock_samples: _Optional[_Iterable[_Union[ClockSample, _Mapping]]] = ...) -> None: ...

class TracedStep(_message.Message):
    __slots__ = ("step", "num_slots", "has_draft", "draft_waits", "verify_waits", "num_prompt_tokens", "num_decoding", "num_draft_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAITS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WAITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_slots: int
    has_draft: bool
    draft_waits: _containers.RepeatedCompositeFieldContainer[_worker_pb2.FenceWait]
    verify_waits: _containers.RepeatedCompositeFieldContainer[_worker_pb2.FenceWait]
    num_prompt_tokens: int
    num_decoding: int
    num_draft_tokens: int
    def __init__(self, step: _Optional[int] = ..., num_slots: _Optional[int] = ..., has_draft: _Optional[bool] = ..., draft_waits: _Optional[_Iterable[_Union[_worker_pb2.FenceWait, _Mapping]]] = ..., verify_waits: _Optional[_Iterable[_Union[_worker_pb2.FenceWait, _Mapping]]] = ..., num_prompt_tokens: _Optional[int] = ..., num_decoding: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class TracedProcess(_message.Message):
    __slots__ = ("name", "pid", "model", "records")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    model: str
    records: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., model: _Optional[str] = ..., records: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ...) -> None: ...

class TraceRecord(_message.Message):
    __slots__ = ("site", "step", "begin_ns", "end_ns")
    SITE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    site: TraceSite
    step: int
    begin_ns: int
    end_ns: int
    def __init__(self, site: _Optional[_Union[TraceSite, str]] = ..., step: _Optional[int] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class ClockSample(_message.Message):
    __slots__ = ("device_ns", "host_ns", "uncertainty_ns")
    DEVICE_NS_FIELD_NUMBER: _ClassVar[int]
    HOST_NS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_NS_FIELD_NUMBER: _ClassVar[int]
    device_ns: int
    host_ns: int
    uncertainty_ns: int
    def __init__(self, device_ns: _Optional[int] = ..., host_ns: _Optional[int] = ..., uncertainty_ns: _Optional[int] = ...) -> None: ...

class ReadRecordsRequest(_message.Message):
    __slots__ = ("from_step",)
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    def __init__(self, from_step: _Optional[int] = ...) -> None: ...

class ReadRecordsResponse(_message.Message):
    __slots__ = ("epoch", "records", "clock", "ranks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    records: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    clock: ClockSample
    ranks: _containers.RepeatedCompositeFieldContainer[TracedProcess]
    def __init__(self, epoch: _Optional[int] = ..., records: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ..., clock: _Optional[_Union[ClockSample, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[TracedProcess, _Mapping]]] = ...) -> None: ...
