#!/usr/bin/env bash
# Builds and checks a release into dist/, and prints what a person must do: bash release.sh VERSION
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
version=${1:?usage: bash release.sh VERSION}
python=${PYTHON:-.venv/bin/python}

stop() { echo "Not released: $1." >&2; exit 1; }

[[ -z $(git status --porcelain) ]] || stop "commit or remove the changes that git status shows"
[[ $("$python" -c 'import vllm_specplugins; print(vllm_specplugins.__version__)') == "$version" ]] ||
    stop "set __version__ in vllm_specplugins/__init__.py to $version"
grep -q "^## $version (20..-..-..)$" CHANGELOG.md || stop "name and date the section, as in '## $version (2026-12-01)', in CHANGELOG.md"
[[ ${SPECPLUGINS_TESTED:-} == "$version" ]] ||
    stop "run bash tests/run.sh, then set SPECPLUGINS_TESTED=$version, which says that all tests passed"

"$python" -c "import mike, material" 2>/dev/null || stop "pip install '.[docs]' mike, which builds the docs of the version"

rm -rf dist
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) "$python" -m build --no-isolation --outdir dist .
"$python" -m twine check --strict dist/*
"$python" -m zipfile -l dist/*.whl | grep -q vllm_specplugins/kernels/compiled.py || stop "the wheel lacks the kernels"
(cd dist && sha256sum -- * >SHA256SUMS && sha256sum --check --quiet SHA256SUMS)
# The docs of the version, beside those of earlier ones, as a commit on the local branch gh-pages.
PATH="$(cd "$(dirname "$python")" && pwd):$PATH" NO_MKDOCS_2_WARNING=1 \
    "$python" -c "from mike.driver import main; main()" deploy --update-aliases "$version" latest
git show "gh-pages:$version/index.html" | grep -q "<title>vllm-specplugins" || stop "the branch gh-pages lacks the docs"
echo "dist/ holds the archives of $version and SHA256SUMS, the branch gh-pages its docs. A person does the rest:

git tag -s v$version -m v$version && git push origin v$version     # signs the tag
python -m sigstore sign dist/*.whl dist/*.tar.gz                   # signs the archives (pip install sigstore)
twine upload dist/*.whl dist/*.tar.gz                              # or attach dist/* to the release of the repository
git push origin gh-pages                                           # the docs; mike set-default latest, the first time"
