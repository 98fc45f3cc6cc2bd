"""Small suites, as text: linear layers in blocks, with contenders and a baseline."""

BSR = "{format: bsr, kernel: bsr_triton, params: {block: $block}}"
BSR_ON_CPU = "{format: bsr, kernel: scipy_bsr, params: {block: $block}}"
CSR = "{format: csr, kernel: cusparse_csr}"
CUBLAS, ON_CPU = "{format: dense, kernel: cublas}", "{format: dense, kernel: torch_dense}"
USUAL = {"dtype": "bf16", "pattern": "blocks", "block": "64", "sparsity": "0.5"}


def linear(
    fields: str, *contenders: str, baselines: tuple[str, ...] = (CUBLAS,), title: str = "Small"
) -> str:
    """Return a suite. `fields` are those of its problems, in YAML; USUAL has those left out."""
    usual = "".join(f", {name}: {value}" for name, value in USUAL.items() if name not in fields)
    lines = ["schema: sparsebench/suite@1", f"title: {title}"]
    lines += ["problems:", f"  - {{op: linear, {fields}{usual}}}"]
    for name, entries in (("contenders", contenders), ("baselines", baselines)):
        lines += [f"{name}:", *(f"  - {entry}" for entry in entries)]
    return "\n".join(lines) + "\n"
