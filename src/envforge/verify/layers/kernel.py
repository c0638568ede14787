"""One small Triton kernel: launched where there is a GPU, assembled for named GPUs where there is none."""

from __future__ import annotations

from typing import Any

from envforge.verify.record import Check, Fail, Skip


def add_one(pointer, count, BLOCK: "tl.constexpr"):  # type: ignore[no-untyped-def,name-defined]  # noqa: F821, UP037
    """Adds one to each element (read by Triton from this source; `tl` is put into this module's names first)."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # type: ignore[name-defined]  # noqa: F821
    values = tl.load(pointer + offsets, mask=offsets < count)  # type: ignore[name-defined]  # noqa: F821
    tl.store(pointer + offsets, values + 1.0, mask=offsets < count)  # type: ignore[name-defined]  # noqa: F821


def _kernel() -> Any:
    import triton
    import triton.language

    globals()["tl"] = triton.language
    return triton.jit(add_one)


def launch(check: Check, torch: Any) -> None:
    """Compile for this GPU and run; the result must be right.

    Raises:
        Fail: a wrong result.
    """
    kernel = _kernel()
    values = torch.zeros(1000, device="cuda")
    kernel[(4,)](values, 1000, BLOCK=256)
    torch.cuda.synchronize()
    if not bool((values == 1.0).all()):
        raise Fail("the kernel ran and gave wrong numbers")
    check.say("compiled a kernel and ran it")


def assemble(check: Check, capabilities: list[str]) -> None:
    """Compile and assemble for each compute capability ("8.0") with the ptxas in the wheel; needs no GPU.

    Raises:
        Skip: this release of Triton cannot compile without a device.
        Fail: the assembler does not know a GPU of the plan.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise Skip(f"this release of Triton compiles on a device only ({error})") from error
    kernel = _kernel()
    done, bad = [], []
    for capability in capabilities:
        number = int(capability.replace(".", ""))
        try:
            source = ASTSource(
                fn=kernel,
                signature={"pointer": "*fp32", "count": "i32", "BLOCK": "constexpr"},
                constexprs={"BLOCK": 256},
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", number, 32))
            done.append(f"sm_{number}: {len(compiled.asm['cubin'])} bytes")
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            said = next((line for line in lines if "fatal" in line), lines[0])
            bad.append(f"sm_{number}: {said.strip()[:300]}")
    check.figure(assembled=done, failed=bad)
    if bad:
        raise Fail(f"Triton {triton.__version__} cannot make code for {'; '.join(bad)}")
    check.say(f"assembled a kernel for {', '.join(done) or 'no GPU'}; not run")
