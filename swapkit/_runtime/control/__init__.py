"""Where a session's steps begin and end, what each step does, plans for them, agreement of ranks.

`plan_controller` carries out what `planning/selection/learner.py` decides. A step begins with a
call of the model, and where only parts of it are called with its first event.
`model/step_counter.py` decides where steps end. The separate thread that plans knows only plain
values and holds no lock; code that ends a session waits for it, and the step thread picks up the
result at the end of a step.

Ranks never wait for each other. All that they write for each other is on one `board`, in the store
of the default process group. Each publishes its open sessions; sessions that train the same agree
in rounds (`rank_agreement`), each of which ends once for all ranks. Stages of a pipeline publish
their times, also without waiting: requests get answers in later steps, and a rank believes a note
only if it repeats the mark of its own session. What changes the collectives of a step
(`resharding`) changes at one position in their order on all ranks (`rank_switch`): a change at
steps that each rank counts by itself could let all of them hang. A rank that runs out of memory can
end the others (`rank_alarm`), by threads and connections of its own: a connection serves one
request at a time, and the user's code may wait in one. A thread must not be inside torch's C++ when
the interpreter ends: `pybind11` would abort the process.
"""
