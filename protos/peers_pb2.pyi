from slipstream.protos import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeGatewayRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeGatewayResponse(_message.Message):
    __slots__ = ("service", "num_waiting")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    service: _generation_pb2.ServiceInfo
    num_waiting: int
    def __init__(self, service: _Optional[_Union[_generation_pb2.ServiceInfo, _Mapping]] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class ListHomeJobsRequest(_message.Message):
    __slots__ = ("max_jobs", "before")
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    max_jobs: int
    before: int
    def __init__(self, max_jobs: _Optional[int] = ..., before: _Optional[int] = ...) -> None: ...

class ListHomeJobsResponse(_message.Message):
    __slots__ = ("jobs", "numbers")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.Job]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, jobs: _Optional[_Iterable[_Union[_generation_pb2.Job, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class NamedJobs(_message.Message):
    __slots__ = ("job_ids",)
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_ids: _Optional[_Iterable[str]] = ...) -> None: ...
