"""The Slang compiler in a process of its own, so that its crash is a message.

Run as a script, with the folder of the compiler's libraries: reads jobs from standard input, one
JSON object a line, and answers each with one. Imports nothing of this package.
"""

from __future__ import annotations

import base64
import ctypes
import glob
import json
import os
import sys
from typing import Any

SOURCE_LANGUAGE, COMPUTE_STAGE = 1, 6
NO_OPTIMISATION = 0
"""The optimiser of SPIR-V reassociates products of floats, so that parts of them vanish or
overflow; drivers optimise without that."""

ENTRY_POINT = b"kernel"

_POINTER, _TEXT, _INT = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "spGetBuildTagString": (_TEXT,),
    "spCreateSession": (_POINTER, _TEXT),
    "spCreateCompileRequest": (_POINTER, _POINTER),
    "spDestroyCompileRequest": (None, _POINTER),
    "spAddCodeGenTarget": (_INT, _POINTER, _INT),
    "spSetTargetLineDirectiveMode": (None, _POINTER, _INT, _INT),
    "spSetOptimizationLevel": (None, _POINTER, _INT),
    "spAddSearchPath": (None, _POINTER, _TEXT),
    "spAddPreprocessorDefine": (None, _POINTER, _TEXT, _TEXT),
    "spAddTranslationUnit": (_INT, _POINTER, _INT, _TEXT),
    "spAddTranslationUnitSourceFile": (None, _POINTER, _INT, _TEXT),
    "spAddEntryPoint": (_INT, _POINTER, _INT, _TEXT, _INT),
    "spCompile": (_INT, _POINTER),
    "spGetDiagnosticOutput": (_TEXT, _POINTER),
    "spGetEntryPointCode": (_POINTER, _POINTER, _INT, ctypes.POINTER(ctypes.c_size_t)),
}


def load(folder: str) -> ctypes.CDLL:
    """The compiler's library, its functions declared."""
    (glslang,) = glob.glob(f"{glob.escape(folder)}/libslang-glslang*.so*")[:1]
    ctypes.CDLL(glslang, ctypes.RTLD_GLOBAL)  # found by name only when it is loaded already
    (compiler,) = glob.glob(f"{glob.escape(folder)}/libslang-compiler.so*")[:1]
    library = ctypes.CDLL(compiler)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def compile_job(library: ctypes.CDLL, session: int, job: dict[str, Any]) -> dict[str, Any]:
    """{path, include, defines, target} to {ok, text, code}: diagnostics and code in base64."""
    request = library.spCreateCompileRequest(session)
    try:
        target = library.spAddCodeGenTarget(request, job["target"])
        library.spSetTargetLineDirectiveMode(request, target, 1)  # none: they would name our folder
        library.spSetOptimizationLevel(request, NO_OPTIMISATION)
        library.spAddSearchPath(request, job["include"].encode())
        for name, value in job["defines"].items():
            library.spAddPreprocessorDefine(request, name.encode(), value.encode())
        unit = library.spAddTranslationUnit(request, SOURCE_LANGUAGE, b"kernel")
        library.spAddTranslationUnitSourceFile(request, unit, job["path"].encode())
        entry = library.spAddEntryPoint(request, unit, ENTRY_POINT, COMPUTE_STAGE)
        is_sound = library.spCompile(request) >= 0
        text = (library.spGetDiagnosticOutput(request) or b"").decode(errors="replace")
        size = ctypes.c_size_t()
        at = library.spGetEntryPointCode(request, entry, ctypes.byref(size)) if is_sound else None
        code = ctypes.string_at(at, size.value) if at else b""
        return {"ok": bool(code), "text": text, "code": base64.b64encode(code).decode()}
    finally:
        library.spDestroyCompileRequest(request)


def main() -> None:
    """Answer jobs until the input ends."""
    # Whatever the compiler prints must not land among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    library = load(sys.argv[1])
    session = library.spCreateSession(None)
    for line in sys.stdin:
        answer = compile_job(library, session, json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
