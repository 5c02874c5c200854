"""Find tiles that a pipelined loop overwrites while matmuls still read them.

On Hopper, Triton lets the matmuls of a loop's step run on while the next step begins. A tile that matmuls read from
shared memory then needs as many buffers as the loop has stages. Triton 3.6 to 3.9 counts one less for a tile that is
also read into registers, so that a copy for a later step may overwrite it too early: a few elements of the result are
then wrong, and only at times. Neither the interpreter nor small tests show it, but the compiled code does.
"""

from __future__ import annotations

import re
from typing import Any

DEFINITION = re.compile(r"\s*(%\w+)(?::\d+)? = (\S+) ?(.*)")
BUFFERS = re.compile(r"memdesc<(\d+)x\d+x\d+x.*mutable")


def overwritten(built: Any, stages: int | None = None) -> list[str]:
    """Return the tiles of a compiled kernel that have fewer buffers than their loop has stages.

    Args:
        built: the kernel.
        stages: the stages of its loops, if they are not an option of the compiler.
    """
    stages = built.metadata.num_stages if stages is None else stages
    found: list[str] = []
    buffers: dict[str, tuple[str, int]] = {}
    loops: list[int] = []
    for line in built.asm["ttgir"].splitlines():
        depth = len(line) - len(line.lstrip())
        if loops and line.lstrip().startswith("}") and depth <= loops[-1]:
            loops.pop()
        definition = DEFINITION.match(line)
        if definition is None:
            continue
        name, operation, rest = definition.groups()
        buffers.pop(name, None)
        if operation in ("scf.for", "scf.while"):
            loops.append(depth)
        elif operation == "ttg.local_alloc" and (count := BUFFERS.search(rest)):
            buffers[name] = (name, int(count.group(1)))
        elif operation.startswith("ttg.memdesc_") and (source := re.match(r"%\w+", rest)):
            if source.group() in buffers:
                buffers[name] = buffers[source.group()]
        elif operation == "ttng.warp_group_dot_wait" and loops and "pendings = 0" not in rest:
            operands = (buffers.get(operand) for operand in re.findall(r"%\w+", rest.partition("{")[0]))
            found += [of[0] for of in operands if of is not None and of[1] < stages]
    return found
