"""Support code that tests of several folders share.

Checkpoints and tokenizers
    checkpoints              small random checkpoints of each model family, with a byte-level tokenizer
    eagle3_checkpoints       small EAGLE-3 and EAGLE heads in published layouts, and one that guesses right now and then
    tokenizers_by_kind       a tokenizer of every kind of decoder, and one that fails on a token
    transformers_checkpoints small checkpoints of further families, and greedy tokens of transformers, the reference

Workers in this process
    workers                  `LocalWorker`, a real engine on a real stream without gRPC; `local_workers` starts them
    local_epoch              a scheduler's epoch over local workers, and `Served`, which runs sequences through it
    seeded_jobs              the sequences that they run, the same ones each time
    served_worker            one worker behind gRPC
    hosted                   the same, for tests that play a hostile scheduler
    inline_device            a CPU device that captures and replays steps as a GPU does
    prompt_lookup            prompt lookup in plain Python, the reference
    paged_model              a model with its KV pages, without a worker; `threaded_ranks` lays it on several ranks
    recording_role           a role that records its commands and computes nothing
    simulated_run            the scheduler's batch and plan over simulated workers with a simulated clock

Processes
    worker_processes         draft and verify as processes, and a `WorkerSession` in this one
    running                  `slipstream` commands and `slipstream up` as a user runs them
    eagle3_serving           the bundled EAGLE-3 head behind `slipstream up`, on either device
    cuda_sums                what each of two ranks on GPUs adds up
    other_process            a program on the same memory, told line by line; it runs `fence_user`, `arena_reader` or
                             `gpu_user`
    planted_faults           points at which processes that a test starts die, hang or stop, planted by `at_start`
    example_states           a server's state, and a job's usage
    fake_service             a service that does what its options say; `up_on_fakes` supervises several
    supervised               a supervisor of fake services, the states that they came to, and the kills
    fake_mps_control         a fake of NVIDIA's MPS control program
    late_worker              a worker that is late at one place, on demand
    stuck_worker             a worker whose stream waits for ever
    logged_drafter           the example drafter with a log of its accesses

Servers
    grpc_server              any servicer on a free port
    generation_server        a server of jobs: the real gateway, with a fake scheduler loop behind it
    breaking_proxy           a proxy that breaks connections, delays or loses what passes

Checks and inputs
    leaks                    asserts that a block leaves no thread, descriptor, shared file or mapping behind
    guarded_arena            shared memory that notices writes outside of what is allowed
    hostile_messages         protobuf messages that no honest peer sends
    mutations                files of checkpoints with changes drawn from a seed
    sampling                 which part of a slow property `make test` runs
    sampling_cases           inputs of the token samplers
    trace_format             checks a trace file against the format of Perfetto
    compose_files            the compose files, merged as Docker merges them
    kustomize                the manifests for Kubernetes, rendered as kustomize renders them
    pods                     a pod of these manifests as processes of this host
    fake_cuda                a CUDA driver that tests control
    waiting                  waits until a condition is true
"""
