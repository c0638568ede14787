"""Keeping the matrix: what needs the resolver or a package index beside the rows.

`images` holds the ready-made stacks against the rows; `update` harvests new releases and says what they would change;
`newer` looks up one release that the matrix does not know yet; `rows` keeps what packages' metadata gives the resolver
between runs; `receipts` adds evidence. Nothing here prints; the
command line does. Import the modules themselves: `resolve` needs one of them only.
"""
