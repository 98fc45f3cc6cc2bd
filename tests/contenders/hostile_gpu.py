"""Kernels that attack the contest through the GPU: by streams, graphs and events."""

import torch
from declare import kernel, weight_and_input

from sparsebench.harness.bench import process_state
from sparsebench.kernels._kernel import Launch, Operands


@kernel(device="cuda")
def detours_elapsed_time(operands: Operands) -> Launch:
    """Be right, but let cudaEventElapsedTime write a microsecond and return."""
    w, x = weight_and_input(operands)
    code = bytes.fromhex("c707 6f12833a 31c0 c3")  # mov dword [rdi], 0.001f; xor eax, eax; ret
    process_state.write(process_state.addresses()["cudaEventElapsedTime"], code)
    return Launch(lambda: x @ w.T)


@kernel(device="cuda")
def empty_graph(operands: Operands) -> Launch:
    """Do nothing while captured."""
    w, x = weight_and_input(operands)
    out = x @ w.T

    def run() -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            torch.mm(x, w.T, out=out)
        return out

    return Launch(run)


@kernel(device="cuda")
def every_other_call(operands: Operands) -> Launch:
    """Refuse capture, and work in every second call only."""
    w, x = weight_and_input(operands)
    out, calls = x @ w.T, 0

    def run() -> torch.Tensor:
        nonlocal calls
        calls += 1
        torch.cuda.synchronize()
        if calls < 5 or calls % 2:
            torch.mm(x, w.T, out=out)
        return out

    return Launch(run)


@kernel(device="cuda")
def half_a_graph(operands: Operands) -> Launch:
    """Compute half of the output while captured."""
    w, x = weight_and_input(operands)
    out, half = x @ w.T, len(x) // 2

    def run() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.mm(x[:half], w.T, out=out[:half])
        else:
            torch.mm(x, w.T, out=out)
        return out

    return Launch(run)


@kernel(device="cuda")
def other_stream(operands: Operands) -> Launch:
    """Work on another stream, which nothing waits for."""
    w, x = weight_and_input(operands)
    side, out = torch.cuda.Stream(), x @ w.T

    def run() -> torch.Tensor:
        with torch.cuda.stream(side):
            return torch.mm(x, w.T, out=out)

    return Launch(run)


@kernel(device="cuda")
def replaces_events(operands: Operands) -> Launch:
    """Be right, but make every event report a nanosecond."""
    w, x = weight_and_input(operands)
    torch.cuda.Event.elapsed_time = lambda self, end_event: 1e-6
    return Launch(lambda: x @ w.T)


@kernel(device="cuda")
def stale_from_python(operands: Operands) -> Launch:
    """Work while captured, but only in the first calls from Python."""
    w, x = weight_and_input(operands)
    out, calls = x @ w.T, 0

    def run() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls < 6 or torch.cuda.is_current_stream_capturing():
            torch.mm(x, w.T, out=out)
        return out

    return Launch(run)
