from slipstream.protos import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeSupervisorRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SupervisorDescription(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[SupervisedService]
    def __init__(self, services: _Optional[_Iterable[_Union[SupervisedService, _Mapping]]] = ...) -> None: ...

class SupervisedService(_message.Message):
    __slots__ = ("name", "pid", "state", "num_restarts", "last_end", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_END_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    state: str
    num_restarts: int
    last_end: str
    address: str
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., num_restarts: _Optional[int] = ..., last_end: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class SwapDraftModelRequest(_message.Message):
    __slots__ = ("draft", "algorithm", "num_draft_tokens", "judge_steps", "rollback_below")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JUDGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_BELOW_FIELD_NUMBER: _ClassVar[int]
    draft: str
    algorithm: str
    num_draft_tokens: int
    judge_steps: int
    rollback_below: float
    def __init__(self, draft: _Optional[str] = ..., algorithm: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., judge_steps: _Optional[int] = ..., rollback_below: _Optional[float] = ...) -> None: ...
