"""Recording a step on CUDA, on the simulation: see `test_simulated_swapkit.py`."""

from __future__ import annotations

import pytest

from tests.cuda.processes import run


@pytest.mark.parametrize("sleeps", [True, False])
def test_recorder_when_an_operator_is_rescued_then_its_time_is_without_that(sleeps: bool) -> None:
    lines = run(
        f"""
        import time
        from swapkit._runtime.allocators.installation import installed_pool
        from swapkit._runtime.recording.notes import Setting
        from swapkit._runtime.recording.recorder import Recorder
        from swapkit._runtime.model.tracker import ModuleTracker

        if not {sleeps}:
            del torch.cuda._sleep  # as other devices
        swapkit.install("64MiB", device="cuda")
        pool, bytes_of = installed_pool("cuda"), {{"dtype": torch.uint8, "device": "cuda"}}
        held = [torch.ones(32 << 20, **bytes_of)]

        def rescue(needed_bytes):
            time.sleep(0.5)
            return held.pop().numel() if held else 0

        pool.set_rescue(rescue)
        place = torch.device("cuda", 0)
        recorder = Recorder(Setting(device=place, tracker=ModuleTracker(), pool=pool))
        torch.ones(1, device="cuda") + 1  # the simulated operator loads modules of torch's
        recorder.start()
        x = torch.ones(1 << 20, **bytes_of)
        y = torch.zeros(40 << 20, **bytes_of)
        z = x + 1
        recorder.stop()
        operators = recorder.trace().operators
        print(len(held), len(operators) >= 3, sum(each.seconds for each in operators) < 0.3)
        pool.set_rescue(None)
        """
    )
    assert lines == ["0 True True"]


def test_recorder_when_a_graph_is_captured_then_it_adds_nothing_to_that() -> None:
    lines = run(
        """
        from swapkit._runtime.recording.notes import Setting
        from swapkit._runtime.recording.recorder import Recorder
        from swapkit._runtime.model.tracker import ModuleTracker

        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).cuda()
        x = torch.ones(4, 8, device="cuda")
        recorder = Recorder(
            Setting(device=torch.device("cuda", 0), tracker=ModuleTracker(), root=model)
        )
        given = []
        sleep = torch.cuda._sleep
        torch.cuda._sleep = lambda cycles: given.append(cycles) or sleep(cycles)
        take = recorder.bytes._checksums.take
        recorder.bytes._checksums.take = lambda tensor: given.append(take(tensor)) or given[-1]
        recorder.start()
        model(x)
        print(len(given) > 1)
        given.clear()
        torch.cuda.is_current_stream_capturing = lambda: True
        model(x)
        torch.cuda.is_current_stream_capturing = lambda: False
        recorder.stop()
        print(len(given) > 0, set(given), len(recorder.rows))
        """
    )
    assert lines == ["True", "True {None} 4"]
