"""Signatures over bundles, by the model signing of OpenSSF: the file ``model.sig`` is written and verified. Needs the extra ``sign``."""
