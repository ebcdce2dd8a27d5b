"""Under a limit of address space (`ulimit -v`) the pool leaves most of it to the program."""

from __future__ import annotations

from tests.support import finish_python, start_python


def test_pool_when_address_space_is_limited_then_it_reserves_a_part_and_trains() -> None:
    finish_python(
        start_python(
            """
            import resource
            import torch
            import swapkit

            MIB = 1 << 20

            def mapped():
                with open("/proc/self/statm") as file:
                    return int(file.read().split()[0]) * resource.getpagesize()

            swapkit.install(device="cpu")
            limit = mapped() + 2048 * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            before = mapped()
            torch.ones(10)
            reserved = mapped() - before
            assert 0 < reserved <= (limit - before) // 2, reserved
            model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with swapkit.budget("64MiB", model, optimizer):
                for _ in range(8):
                    model(torch.ones(1024, 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            bytearray(256 * MIB)  # outside the pool
            room = limit - mapped()
            # More than a share of the room, if the program asks for it.
            torch.empty(room * 3 // 4, dtype=torch.uint8)
            """
        )
    )
