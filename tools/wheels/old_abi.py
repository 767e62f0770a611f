"""What the linker takes for glibc and libstdc++ in a build that must run on older systems than this one.

A library that is linked here asks for the newest version of each symbol that this machine has, and loads on no older
system. This writes stand-ins of libc, libm and libstdc++ with the symbols of an older system alone, and the newest
version of each that it had. They hold no code and are not used at run time. What is newer in libstdc++ is linked from
libstdc++.a, as in the compilers that Red Hat builds for its older systems. What is newer in glibc is written here, or
fails the check of the wheel.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# The newest symbol versions of manylinux_2_28: glibc 2.28 and the libstdc++ of GCC 7.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# In libc itself since glibc 2.34; before, threads and dlopen were in libraries of their own.
_LATER_MERGED = {"pthread": "libpthread.so.0", "dl": "libdl.so.2", "rt": "librt.so.1"}
# New in glibc 2.32: libstdc++ reads __libc_single_threaded to save atomic operations. 0: there may be several threads.
# New in glibc 2.33: stat and fstat. Older headers made them calls of the other two, with a version of the structure.
_NEWER = """
struct stat;
int __xstat(int, const char*, struct stat*);
int __fxstat(int, int, struct stat*);
#ifdef __x86_64__
enum { kVersion = 1 };
#else
enum { kVersion = 0 };
#endif
#pragma GCC visibility push(hidden)
char __libc_single_threaded;
int stat(const char* path, struct stat* found) { return __xstat(kVersion, path, found); }
int fstat(int file, struct stat* found) { return __fxstat(kVersion, file, found); }
"""


def is_too_new(version: str) -> bool:
    """Whether a symbol version such as GLIBC_2.34 is newer than any in :data:`NEWEST`."""
    family, _, number = version.partition("_")
    return family in NEWEST and bool(re.fullmatch(r"[\d.]+", number)) and _number(version) > NEWEST[family]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.rpartition("_")[2].split("."))


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _found(name: str, compiler: str) -> Path:
    """A file of the compiler's, by its name."""
    return Path(_run(f"{compiler}g++", f"-print-file-name={name}").strip()).resolve()


def _symbols(library: Path) -> dict[str, tuple[str, str]]:
    """Symbol -> (type, the newest version that is old enough)."""
    result: dict[str, tuple[str, str]] = {}
    for line in _run("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) != 8 or "@" not in fields[7] or fields[6] in ("UND", "ABS"):
            continue
        symbol, _, version = fields[7].replace("@@", "@").partition("@")
        family, _, number = version.partition("_")
        if family not in NEWEST or not re.fullmatch(r"[\d.]+", number) or is_too_new(version):
            continue
        if symbol not in result or _number(version) > _number(result[symbol][1]):
            result[symbol] = (fields[3], version)
    return result


def _stand_in(folder: Path, soname: str, symbols: dict[str, tuple[str, str]], compiler: str) -> Path:
    """A shared library with these symbols and no code."""
    assembly, nodes = [], dict[str, list[str]]()
    for symbol, (kind, version) in symbols.items():
        section = {"OBJECT": ".data", "TLS": '.section .tdata,"awT",@progbits'}.get(kind, ".text")
        elf_type = {"OBJECT": "@object", "TLS": "@tls_object"}.get(kind, "@function")
        assembly.append(f'{section}\n.globl "{symbol}"\n.type "{symbol}", {elf_type}\n"{symbol}": .quad 0\n')
        if kind != "NOTYPE":
            assembly.append(f'.size "{symbol}", 8\n')
        nodes.setdefault(version, []).append(symbol)
    source, script, library = folder / f"{soname}.s", folder / f"{soname}.map", folder / soname
    source.write_text("".join(assembly))
    script.write_text(
        "".join(
            f"{version} {{ global: " + " ".join(f'"{symbol}";' for symbol in names) + " };\n"
            for version, names in nodes.items()
        )
    )
    version_script = [f"-Wl,--version-script={script}"] if nodes else []
    _run(f"{compiler}g++", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", *version_script, "-o", library, source)
    return library


def write(folder: Path, compiler: str = "") -> dict[str, str]:
    """Writes the stand-ins. Returns the CMake variables of a build with them. ``compiler`` is what comes before g++ in
    the name of a cross compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    for link_name, soname in _LATER_MERGED.items():
        _stand_in(folder, soname, {}, compiler).rename(folder / f"lib{link_name}.so")
    libraries = {
        name: _stand_in(folder, name, _symbols(_found(name, compiler)), compiler)
        for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6")
    }

    (folder / "newer.c").write_text(_NEWER)
    _run(f"{compiler}gcc", "-c", "-fPIC", "-o", folder / "newer.o", folder / "newer.c")
    _run("ar", "rcs", folder / "libnewer.a", folder / "newer.o")

    # A file that says what to link is what -lc is on most systems.
    loader = re.search(r"AS_NEEDED *\([^)]*\)", _found("libc.so", compiler).read_text())
    nonshared = _found("libc_nonshared.a", compiler)
    rest = f"{folder / 'libnewer.a'} {nonshared} {loader[0] if loader else ''}"
    (folder / "libc.so").write_text(f"GROUP ( {libraries['libc.so.6']} {rest} )\n")
    (folder / "libm.so").write_text(f"INPUT ( {libraries['libm.so.6']} )\n")
    (folder / "libstdc++.so").write_text(f"INPUT ( {libraries['libstdc++.so.6']} {_found('libstdc++.a', compiler)} )\n")

    merged = ",".join(f"-l{name}" for name in _LATER_MERGED)
    flags = f"-L{folder} -Wl,--exclude-libs,ALL -Wl,--push-state,--no-as-needed,{merged},--pop-state"
    header = Path(__file__).with_name("old_abi.hpp").resolve()
    return {
        "CMAKE_CXX_FLAGS": f"-include {header}",
        "CMAKE_SHARED_LINKER_FLAGS": flags,
        "CMAKE_MODULE_LINKER_FLAGS": flags,
    }
