"""A whole server in one thread, from a seed: the real scheduler and the real gateway against simulated surroundings.

    clients.py      Client, Client, …      leave, come back, cancel; know every token that they must get
                       |  ClientCall             transport.py: in order, late, broken off
    processes.py    GatewayProcess         REAL GenerationServicer, JobManager, journal (on SQLite), SchedulerLink
                       |  SimulatedRunStream     transport.py
    processes.py    SchedulerProcess       REAL SchedulerServicer, WorkerSession, Epoch, StepLoop, Batch, WaitingQueue,
                       |                        plan, accounts, output, Speculation, Draft, DraftSession, Swap
                       |  SimulatedLink          links.py: commands in order, acknowledgements, calls
    workers.py      SimulatedWorker × 3    verify, two drafts: each a stream, a checksum as a model, the REAL FutureMap
                       |                        (in worker_epochs.py)
                       |
    memory.py       SimulatedArena         shared memory, laid out as in reality; fences are words in it

`world.py` has the clock and the queue of events; all of the above happens there, one event at a time, with delays drawn
from the seed. Real code that blocks (the step loop, the journal's thread) runs on greenlets that give their turn back
where they wait; real code of an event loop runs on `event_loop.py`. `substitutes.py` puts clock and threads into it.

`faults.py` draws what goes wrong: any process is killed or stopped between any two events, a stream rests or hangs, a
connection breaks, a draft is swapped, a clock is set, the host boots. `schedule.py` draws a server's settings, its
clients and its faults from one seed, runs them, and is the oracle:

- every token at a client is the reference's at that place, without a gap and without repetition (as the real client's
  reader counts them), and every sample has one end, for the right reason;
- afterwards no slot, page, sequence or job is held by anything, and the draft that is wanted drafts;
- a draft's fault ends no epoch, and no process touches a region that was given back;
- no wait ends without its signal, nothing waits for ever, and no thread or callback of the real code raises.

A schedule that fails prints its seed and its story. `python -m tests.simulator SEED` runs it again, the same in every
event; without a seed it says after how many schedules each of the bugs in `planted_bugs.py` is found.
"""
