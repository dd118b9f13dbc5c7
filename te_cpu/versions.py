"""Say which versions of Transformer Engine run on a CPU, without importing it or torch.

`python -m scripts.te_versions` tries every version of `HASHES` and writes
docs/reference/te_versions.md.
"""

from __future__ import annotations

import re

OLDEST = (2, 4)
"""The oldest version that works; 2.2 and 2.3 keep the gradient quantizers of the MLP in other
columns of the scaling tensors."""
DEFAULT_VERSION = "2.12.0"
"""The version that is loaded where none was asked for."""
_WHOLE = re.compile(r"\d+\.\d+\.\d+(\.post\d+)?")

HASHES = {
    "2.4.0": "c2a845e433fcf81497cbc53334c99725bd2faa361e7548342e95398acb06e8ce",
    "2.5.0": "a78a2ad01b1f97bccd740f701287fa43cf6ba37ba5a9b2d8c401d35ecdd0898e",
    "2.6.0": "6d4483a46bae7bd338fd363d3a9f245abe7d6983e6dc08623b78e8210dfdb5ab",
    "2.6.0.post1": "deb1ed2a937fbcce7e825e38461e360ca3057147996a8269dc8b868a21672486",
    "2.7.0": "99f6c61df25fc36db1b62d45a2502662ed6d3560d9657f39827af3911b6bb3b7",
    "2.8.0": "795b056d31b0f67f5d7432725177782dd5084090c1e3c52532577070947fe9a7",
    "2.9.0": "953147ed4c490e54c9884bb0d876a1341f05c5c5b7d304bf61f4740f6faee5af",
    "2.10.0": "a14ccf4e887409be062c0bd8c4a341df55a77baad6aea6aabfe39c24e38252e5",
    "2.11.0": "7ee1eae8fa6b0cb471c6066aa3555304fda8537174e5019929dc0c8655071df3",
    "2.12.0": "5d0539c520c39445c62feab9d1fab774ed2e27a576d0feac2086ce86e0bff7c4",
    "2.13.0": "cb1ad42df836dbe704f9bd140089d6358d7ebea2eeb36f90d533af4504fe2005",
    "2.14.0": "2b34fe1045976f5612b59ce5c573639840f08cc5db4823e17f0b9f0bb31e5ec7",
    "2.14.1": "ad0e5e3c11b90bc98f7dd843c7af06d8a321361ac0df8c6c35326c9b437bdfec",
    "2.15.0": "4015c5b9a7aa420f4f123e49ea795de31ae6f781fa1180c118d0ee40525eed8d",
    "2.16.0": "ac2bb54d5217c574410079d99204b5634eb3a1137b0324f4a6dd3358982aa4f5",
    "2.16.1": "1da67b1b8629bd4439711161957be656dc0cd3e0e4e47cbe7a21a40430b23c67",
    "2.17.0": "c274fd74ea2e4caa7132921e1ecfa3847931abbed9f6b8cab61346cdb833bc76",
    "2.17.1": "8a4543c0b0ffe4c6117bfbe7a0b6bb9acba0d159782fa4922aaee202ba2cfdc9",
    "2.18.0": "9d7c4bd74247e57eeed2af46f7b91c133cc405404953f1f3f2e38be8c47cdb7e",
    "2.19.0": "965d78429d287f7db6978bf299cfcecf68c730247f05cc830ecc6983a123bbc7",
    "2.20.2": "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094",
}
"""Every release on PyPI from the oldest one on that was tried, with the SHA-256 of its wheel."""


def release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: "2.12.0" -> (2, 12)."""
    return tuple(int(number) for number in version.split(".")[:2])


NEWEST_TRIED = max(map(release_of, HASHES))


def why_not(version: str) -> str | None:
    """Return why the Python of a version cannot be fetched to run on a CPU, or None."""
    if not _WHOLE.fullmatch(version):
        return f"is no whole version, such as {DEFAULT_VERSION}"
    if release_of(version) < OLDEST:
        return f"{version} is too old: it must be {'.'.join(map(str, OLDEST))} or later"
    if release_of(version)[0] > NEWEST_TRIED[0]:
        newest = ".".join(map(str, NEWEST_TRIED))
        return f"{version} is too new to be known here: versions up to {newest} were tried"
    return None
