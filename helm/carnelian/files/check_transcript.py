"""The script of `helm test`, in the client's image: transcribes a recording and compares the text with a reference."""

import argparse
import sys
from pathlib import Path

from carnelian_client import TLS, CarnelianClient, CarnelianClientError


def character_error_rate(heard: str, reference: str) -> float:
    """Returns the Levenshtein distance of the texts, in characters, divided by the length of the reference."""
    row = list(range(len(reference) + 1))
    for i, letter in enumerate(heard, 1):
        diagonal, row[0] = row[0], i
        for j, expected in enumerate(reference, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != expected))
    return row[-1] / len(reference)


def main() -> None:
    """Ends with status 0 if the recording was understood, else with 1 and the reason."""
    parser = argparse.ArgumentParser()
    for name in ("--url", "--model", "--clip", "--reference"):
        parser.add_argument(name, required=True)
    parser.add_argument("--max-cer", type=float, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--tls", type=Path, help="folder of tls.crt, tls.key and, if it is not a public one, ca.crt")
    options = parser.parse_args()
    tls = None
    if options.tls:
        ca = options.tls / "ca.crt"
        tls = TLS(
            ca_path=ca if ca.is_file() else None,
            cert_path=options.tls / "tls.crt",
            key_path=options.tls / "tls.key",
        )
    try:
        with CarnelianClient(options.url, model=options.model, timeout_s=options.timeout, tls=tls) as client:
            heard = client.transcribe(options.clip).text
    except (CarnelianClientError, OSError) as error:
        sys.exit(f"helm test: {options.url} must transcribe {options.clip}, but: {error}")
    rate = character_error_rate(heard, options.reference)
    print(f"said   {options.reference}\nheard  {heard}\ncharacter error rate {rate:.2f}, allowed {options.max_cer}")
    sys.exit(rate > options.max_cer)


if __name__ == "__main__":
    main()
