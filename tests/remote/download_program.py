"""Downloads all files of the bundle at a URL; a test kills it, or runs it twice at once."""

import sys

import stagepack

if __name__ == "__main__":
    bundle = stagepack.open(sys.argv[1])
    bundle.fetch(bundle.files)
    sys.stdout.write(bundle.digest)
